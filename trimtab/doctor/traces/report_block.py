"""Which facts about machine, versions, model, map and adapter belong into a question or an issue?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.errors import gib
from trimtab.machine.environment import Environment, environment_document
from trimtab.process.redact import check_clean, clean, clean_all
from trimtab.report.document import Code, Document, changed, joined
from trimtab.report.render import FORMS

MOST_KEYS = 40
MOST_CHARS = 600
# Fields of a config.json that identify the model; the others are sizes.
CONFIG_FIELDS = ("model_type", "architectures", "num_hidden_layers", "tie_word_embeddings", "quantization_config")
# Information that a reader of a report needs next, and that only the live model has.
TO_ADD = (
    "print(model.hf_device_map), before and after the adapter was loaded",
    "the call of from_pretrained, and of PEFT's, with all arguments",
    "the whole traceback",
)  # fmt: skip


def report_block(
    environment: Environment, *, model: str | None = None, adapter: str | None = None,
    device_map: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return the block as Markdown. Errors: CheckpointError, AdapterError for unreadable files; RequestError if it would
    contain personal data."""
    parts: list[tuple[str, list[str]]] = []
    if model is not None:
        parts.append(("Model", _model(model)))
    if device_map is not None:
        parts.append(("Requested placement", _map(device_map)))
    if adapter is not None:
        parts.append(("Adapter", _adapter(adapter)))
    parts.append(("Please add", list(TO_ADD)))
    # Names, patterns, maps and code are shown as they are, so that nothing in them is markup.
    shown = [Document(title, [Code("\n".join(lines))]) for title, lines in parts]
    whole = joined("Versions, memory and files", [changed(environment_document(environment), clean), *shown])
    text = FORMS[".md"].show(whole)
    check_clean(text, what="report")
    return text


def _model(model: str) -> list[str]:
    from trimtab.checkpoint.folder import read_checkpoint

    checkpoint = read_checkpoint(model)
    text = checkpoint.config.get("text_config") or {}
    config = {name: value for name in CONFIG_FIELDS if (value := checkpoint.config.get(name, text.get(name))) is not None}
    nbytes = sum(entry.nbytes for entry in checkpoint.tensors.values())
    dtypes = sorted(Counter(one.dtype for one in checkpoint.tensors.values()).items())
    weights = f"{len(checkpoint.tensors)} tensors, {gib(nbytes)}, {', '.join(f'{dtype} {count}' for dtype, count in dtypes)}"
    return [*(f"{name}: {_short(value)}" for name, value in config.items()), f"weights: {weights}"]


def _map(device_map: Mapping[str, Any]) -> list[str]:
    counts = Counter(str(device) for device in device_map.values())
    shown = dict(list(device_map.items())[:MOST_KEYS])
    more = [f"({len(device_map) - MOST_KEYS} keys more)"] if len(device_map) > MOST_KEYS else []
    return [
        "keys by device: " + ", ".join(f"{device}: {count}" for device, count in counts.items()),
        f'a "" key: {"yes" if "" in device_map else "no"}',
        json.dumps(clean_all(shown), indent=1),
        *more,
    ]


def _adapter(adapter: str) -> list[str]:
    from trimtab.adapters.adapter import describe, read_adapter

    described = describe(read_adapter(adapter), None)
    rows = [f"{name}: {_short(value)}" for name, value in described["config"].items()]
    rows.append(f"target_modules: {_short(described['target_modules'])}")
    rows.append(f"{described['tensors']} tensors, {gib(described['bytes'])}, by part: {_short(described['parts'])}")
    if described["peft_version"]:
        rows.append(f"written by PEFT {described['peft_version']}")
    return rows


def _short(value: Any) -> str:
    text = clean(value if isinstance(value, str) else json.dumps(clean_all(value), default=str))
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ({len(text) - MOST_CHARS} characters more)"
