"""Adapters and weights of an answer: the combined meaning of `--adapter NAME=PATH:0.7` and `--use`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from trimtab.adapter_names import is_mix, parse_adapters, parse_mix
from trimtab.cli.flags.flags import BASE, adapter_to_use
from trimtab.errors import RequestError
from trimtab.planning import Plan
from trimtab.request import LoadRequest


def chosen(options: argparse.Namespace, source: Plan | LoadRequest, *, base_of_several: bool = False) -> Any:
    """Return the active adapter: a name, name -> weight, or None for the base.

    With a weight on any of them and no --use, all adapters are combined. base_of_several: whether several adapters
    without a weight select the base. `base` means no adapter, unless an adapter has that name. Errors: RequestError.
    """
    weights = {one.name: one.weight for one in parse_adapters(options.adapter or (), field="--adapter")}
    request = source.request if isinstance(source, Plan) else source
    names, use = list(request.adapters), options.use
    if use is not None and is_mix(use):
        mix = parse_mix(use, field="--use")
        for name in mix:
            adapter_to_use(name, names)
            if weights.get(name, 1) != 1:
                raise RequestError(
                    f"the weight of {name} in --adapter has no effect with a mix; set it in --use alone", field="--use", value=use
                )
        return mix
    if use == BASE and BASE not in names:
        return None
    if use is None and any(weight != 1 for weight in weights.values()):
        return dict(weights)
    if use is None and base_of_several and len(names) > 1:
        return None
    one = adapter_to_use(use, names, also=(BASE,))
    weight = 1.0 if one is None else weights.get(one, 1.0)
    return one if weight == 1 else {one: weight}


def mix_text(adapter: Any) -> str:
    """Return the text form of an adapter or a mix."""
    if isinstance(adapter, Mapping):
        return "+".join(f"{name}:{weight:g}" for name, weight in adapter.items())
    return BASE if adapter is None else str(adapter)
