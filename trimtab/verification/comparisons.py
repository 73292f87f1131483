"""The comparisons: every value of `against` becomes two routes, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError
from trimtab.formats.packed import split_packed
from trimtab.planning import Plan
from trimtab.request import DEFAULT_QUANT, EXPERTS, MADE_EXPERTS, LoadRequest
from trimtab.verification.routes import compare
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.routes.runner import Route

AGAINST: Mapping[str, str] = {
    "resident": "the plan's tiers against every weight resident", "stock": "trimtab against transformers, bitsandbytes and PEFT",
    "base": "the adapter against the base: is it active at all?", "bf16": "quantized weights against bf16 ones",
    "full-head": "an 8-bit output head against the full one", "single": "prompts in one batch against each alone",
    "alone": "several adapters in one batch against each alone",
    "eager": "answers token by token, from captured steps where there is a GPU, against one pass of the modules",
}  # fmt: skip
BATCH_ROWS = 4
FOLDER_HINT = "or the folder of a merged model"
PLANNED_AUDIO_S = 30.0
RESIDENT: Mapping[str, Any] = {"place": {"*": "resident"}, "device_map": None, "gpu_memory_bytes": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: the reference route, the route compared with it, and the adapters."""

    against: str
    model: str
    reference: Route
    subject: Route
    adapter: str | None
    adapters: Mapping[str, str]
    expected: str = compare.SAME
    merged: Path | None = None


def case_of(
    plan: Plan | None, request: LoadRequest, checkpoint: Checkpoint, against: str | Path,
    adapter: str | None, given: Sequence[Prompt], python: str | Path | None,
) -> Case:  # fmt: skip
    """Return the two routes of a comparison. Errors: RequestError for an unknown comparison, or one with nothing to compare."""
    word = str(against)
    folder = None if word in AGAINST else _merged_folder(word, checkpoint)
    name = None if word == "alone" else _adapter(request, adapter)
    if plan is not None:
        _check_planned(request, given)
    audio_s = PLANNED_AUDIO_S if any(prompt.audio for prompt in given) else 0.0
    sized = replace(request, images=int(any(prompt.image for prompt in given)), audio_s=audio_s)
    ours = Route(label="trimtab", plan=plan, request=None if plan else sized)
    if folder is not None:
        reference, subject = _merge_routes(ours, checkpoint, folder, name)
    else:
        reference, subject = _routes(word, ours, sized, checkpoint, name, python)
    return Case(
        against=word if folder is None else str(folder), model=request.model, reference=reference, subject=subject, adapter=name,
        adapters=dict(request.adapters), expected=compare.DIFFERS if word == "base" else compare.SAME, merged=folder,
    )  # fmt: skip


def _adapter(request: LoadRequest, adapter: str | None) -> str | None:
    names = list(request.adapters)
    if adapter is None and len(names) > 1:
        raise RequestError("several adapters are loaded; name the one that answers", field="adapter", allowed=names)
    if adapter is not None and adapter not in names:
        raise RequestError(
            "no adapter of this name is loaded", field="adapter", value=adapter,
            allowed=names, near=near_names(str(adapter), names),
        )  # fmt: skip
    return adapter or (names[0] if names else None)


def _check_planned(request: LoadRequest, prompts: Sequence[Prompt]) -> None:
    for name, unplanned in (("image", not request.images), ("audio", not request.audio_s)):
        ids = [prompt.id for prompt in prompts if getattr(prompt, name)]
        if unplanned and ids:
            raise RequestError(
                f"the plan counted no memory for the {name} of {', '.join(ids)}", field="prompts",
                hint=f"Plan with {'images=1' if name == 'image' else 'audio_s=30'}, or give text prompts alone",
            )  # fmt: skip


def _of(route: Route, label: str, **changes: Any) -> Route:
    """Return a route planned again from another's request, with changes."""
    request = route.plan.request if route.plan is not None else route.request
    assert request is not None
    return Route(label=label, request=replace(request, **changes))


def _routes(
    word: str, ours: Route, request: LoadRequest, checkpoint: Checkpoint, adapter: str | None, python: str | Path | None
) -> tuple[Route, Route]:  # fmt: skip
    """Return the reference of a comparison and the route compared with it. Errors: RequestError if both would be the same."""
    if word == "stock":
        return _stock_route(request, checkpoint, python), ours
    if word == "resident":
        return _of(ours, "every weight resident", **RESIDENT), replace(ours, label="the plan's tiers")
    if word == "base":
        if adapter is None:
            raise RequestError("needs an adapter to compare with the base", field="adapter", hint="Give one with adapters=")
        return replace(ours, label=f"adapter {adapter}"), replace(ours, label="the base")
    if word == "eager":
        return replace(ours, label="one pass"), replace(ours, label="step by step", decode="auto")
    if word == "full-head":
        if request.head == "full":
            raise RequestError(
                "compares an 8-bit head with the full one: request the 8-bit head", field="against", value=word, hint="head='int8'"
            )
        return _of(ours, "the whole head", head="full", **RESIDENT), replace(ours, label="the 8-bit head")
    if word == "bf16":
        if (request.quant == "none" and request.experts not in MADE_EXPERTS) or split_packed(checkpoint)[1]:
            raise RequestError(
                "compares a quantized load with the unquantized checkpoint: give quant= and the original checkpoint",
                field="against", value=word,
            )  # fmt: skip
        whole = _of(ours, "bf16 weights", quant="none", gpu_memory_bytes=None, keep_unquantized=(), head="full", experts=EXPERTS[0])
        experts = f", {request.experts} experts" if request.experts in MADE_EXPERTS else ""
        return whole, replace(ours, label=f"{DEFAULT_QUANT if request.quant == 'auto' else request.quant} weights{experts}")
    if word == "alone" and len(request.adapters) < 2:
        raise RequestError("needs at least two adapters", field="adapters", value=list(request.adapters))
    one, several = ("each alone", "in one batch") if word == "single" else ("each adapter alone", "adapters mixed in one batch")
    subject = _batched(ours, word, several)
    return replace(subject, label=one, batched=0), subject


def _stock_route(request: LoadRequest, checkpoint: Checkpoint, python: str | Path | None) -> Route:
    from trimtab.api import resolve_quant
    from trimtab.engine.memory import rates

    if request.keep_unquantized:
        raise RequestError(
            "the stock stack has no equivalent of keep_unquantized: the option would replace its own list", field="against",
            value="stock",
        )  # fmt: skip
    if request.head != "full":
        raise RequestError("the stock stack has no 8-bit head", field="against", value="stock", hint="Compare against full-head")
    return Route(
        label="the stock stack", engine="stock", folder=str(checkpoint.folder), dtype=request.dtype,
        quant=resolve_quant(request.quant, checkpoint), experts=request.experts, device=rates.resolve_device(request.device),
        adapters=dict(request.adapters), python=str(python) if python is not None else None,
    )  # fmt: skip


def _batched(ours: Route, word: str, label: str) -> Route:
    if ours.plan is None:
        return replace(_of(ours, label, batch=BATCH_ROWS), batched=BATCH_ROWS)
    if ours.plan.request.batch < 2:
        raise RequestError("the plan is for one row", field="against", value=word, hint="Plan with batch=2 or more")
    return replace(ours, label=label, batched=ours.plan.request.batch)


def _merge_routes(ours: Route, checkpoint: Checkpoint, folder: Path, adapter: str | None) -> tuple[Route, Route]:
    if adapter is None:
        raise RequestError("needs the merged adapter to compare with", field="adapter", hint="Give one with adapters=")
    packed = bool(split_packed(read_checkpoint(folder))[1])
    merged = _of(
        ours, f"merged model {folder.name}", model=str(folder), adapters={}, gpu_memory_bytes=None,
        **({"quant": "auto"} if packed else {"quant": "none"} if split_packed(checkpoint)[1] else {}),
    )  # fmt: skip
    return replace(ours, label=f"adapter {adapter} loaded"), merged


def _merged_folder(word: str, checkpoint: Checkpoint) -> Path:
    """Return the folder of a merged model. Errors: RequestError for an unknown word, no path, or another architecture;
    CheckpointError for a path without a model."""
    path = Path(word)
    is_path = path.exists() or path.is_absolute() or word.startswith(("./", "../"))
    if not is_path:
        near = near_names(word, AGAINST)
        raise RequestError("unknown comparison", field="against", value=word, allowed=(*AGAINST, FOLDER_HINT), near=near)
    merged = read_checkpoint(word)
    wrong = [
        f"{name} is {theirs}, the model's is {ours}"
        for name, ours, theirs in (
            (name, _shape(checkpoint.config, name), _shape(merged.config, name))
            for name in ("architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        )
        if ours != theirs
    ]
    if wrong:
        raise RequestError(f"is not a merge of this model: {'; '.join(wrong)}", field="against", value=word)
    return merged.folder


def _shape(config: Mapping[str, Any], name: str) -> Any:
    text = config.get("text_config") or {}
    return config.get(name, text.get(name))
