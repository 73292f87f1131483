"""Do two routes to the same answer agree?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.adapter_names import Adapters, paths_of
from trimtab.adapters.file import check_vocabulary
from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.names import named_options
from trimtab.errors import RequestError, TrimtabError
from trimtab.formats.packed import split_packed
from trimtab.planning import Plan
from trimtab.process import before_torch, phases
from trimtab.process.packages import STOCK, check_installed, stack_versions
from trimtab.process.runner import check_python
from trimtab.process.work_folder import work_folder
from trimtab.report.document import some
from trimtab.request import EXPERTS, MADE_EXPERTS, LoadRequest
from trimtab.verification.comparisons import AGAINST, Case, case_of
from trimtab.verification.render.report import ParityReport, PromptParity
from trimtab.verification.routes import compare
from trimtab.verification.routes import prompts as asked
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.routes.runner import Item, Ran, prepare, run_route, to_prepare, with_continuations

if TYPE_CHECKING:
    from trimtab.verification.merges.weights import MergedWeights
    from trimtab.verification.routes.loaded_changes import LoadedChanges

Say = Callable[[str], None]
NEW_TOKENS = 32
SHOWN_MODULES = 5


@named_options
def verify(
    plan_or_model: Plan | LoadRequest | str | Path, *, adapters: Adapters | None = None,
    adapter: str | None = None,
    prompts: str | Path | Sequence[Prompt | Mapping[str, Any] | str] | None = None, against: str | Path = "resident",
    quant: str | None = None, python: str | Path | None = None, new_tokens: int = NEW_TOKENS, lanes: bool = False,
    isolated: bool = True, say: Say | None = None, head: str | None = None,
) -> ParityReport:  # fmt: skip
    """Return a report on two routes to the answers of every prompt.

    plan_or_model: a plan, compared unchanged, a request to plan, or a checkpoint that is planned with `adapters`,
    `head` and `quant` (default: none for a comparison with a merged folder, else the checkpoint's own or nf4-dq).
    adapter: the active one; the only one by default. prompts: a JSONL file, prompts, or None for the built-in set.
    against: a word of AGAINST or a merged model's folder. python: an interpreter with the stock stack for that side.
    new_tokens: length of the greedy answers. lanes: also run the merge lanes. isolated False: everything in this
    process (faster, without peaks of host memory). say: called with a line of text for each step
    (default: the steps are phases, which the command line shows).
    Errors: RequestError, CheckpointError, AdapterError, DoesNotFitError before a route runs; UpstreamError if stock
    fails; DeviceError if a process dies. `report.check()` raises ParityError.

    Each route runs in a separate process. The reference answers first and measures its own noise; the other route then computes
    logits for the same tokens.
    """
    speak = say or phases.begin
    if not isinstance(new_tokens, int) or new_tokens < 1:
        raise RequestError("must be at least 1", field="new_tokens", value=new_tokens)
    if python is not None and str(against) != "stock" and not lanes:
        raise RequestError("has no effect: neither side of this comparison is the stock stack", field="python", value=str(python))
    if python is not None:
        check_python(python)
    elif str(against) == "stock" or lanes:
        check_installed(STOCK, field="against" if str(against) == "stock" else "lanes", value=str(against))
    request = _request(plan_or_model, adapters, quant, head, against)
    if request.kv != "full":
        raise RequestError(
            "logits are compared in passes that keep no keys and values, so 8 bits would not be compared", field="kv",
            value=request.kv, allowed=("full",), hint="Omit it: weights and placement are compared",
        )  # fmt: skip
    if lanes and request.experts in MADE_EXPERTS:
        raise RequestError(
            "the merge lanes compare experts in 16 bits", field="experts", value=request.experts, allowed=EXPERTS[:2]
        )
    checkpoint = read_checkpoint(request.model)
    chosen = asked.given_prompts(prompts)
    with work_folder("verify") as work:
        given = chosen if chosen is not None else asked.built_in(checkpoint.folder, checkpoint.config, work)
        asked.check_modalities(given, checkpoint.config)
        plan = plan_or_model if isinstance(plan_or_model, Plan) else None
        case = case_of(plan, request, checkpoint, against, adapter, given, python)
        if lanes and case.adapter is None:
            raise RequestError("the merge lanes need an adapter", field="adapter", hint="Give one with adapters=")
        check_adapters(checkpoint, request.adapters)
        before_torch.keep_imports()
        before_torch.collect_again()
        speak(f"{len(given)} prompts; {case.reference.label} and {case.subject.label}")
        asking = to_prepare(checkpoint.folder, request.dtype, given, work)
        rows: Sequence[Mapping[str, Any]] | None = None  # the reference's process prepares them, if it can
        if case.reference.engine != "trimtab" or not isolated:
            rows = prepare(checkpoint.folder, request.dtype, given, work, isolated=isolated)
        report, prepared = _compare(case, given, rows, work, new_tokens=new_tokens, isolated=isolated, speak=speak, asking=asking)
        if lanes:
            try:
                report = _with_lanes(report, case, request, given, prepared, work, new_tokens, python, isolated, speak)
            except TrimtabError as exc:  # the comparison is finished and valid
                why = f"the merge lanes could not be run: {exc}"
                report = replace(report, unfinished=why, findings=(*report.findings, why))
    return report


def _request(
    plan_or_model: Plan | LoadRequest | str | Path, adapters: Adapters | None, quant: str | None,
    head: str | None, against: str | Path,
) -> LoadRequest:  # fmt: skip
    merged = str(against) not in AGAINST
    if isinstance(plan_or_model, (Plan, LoadRequest)):
        for name, value in (("adapters", adapters), ("quant", quant), ("head", head)):
            if value is not None:
                raise RequestError("is part of the plan; make the plan with it", field=name, value=value)
        if isinstance(plan_or_model, Plan):
            return plan_or_model.request
        whole = merged and plan_or_model.quant == "auto" and not _is_packed(plan_or_model.model)
        return replace(plan_or_model, quant="none") if whole else plan_or_model
    return LoadRequest(
        model=str(plan_or_model), adapters=paths_of(adapters),
        quant=quant or ("none" if merged and not _is_packed(str(plan_or_model)) else "auto"), head=head or "full",
    )  # fmt: skip


def _is_packed(model: str) -> bool:
    """Return whether a model's files are quantized, so that it is compared as it is."""
    return bool(split_packed(read_checkpoint(model))[1])


def check_adapters(checkpoint: Checkpoint, adapters: Mapping[str, str]) -> None:
    """Raise AdapterError if an adapter does not match this model. Reads headers, no weights."""
    from trimtab.adapters.adapter import match_adapter, read_adapter
    from trimtab.api import PlanInputs, anatomy_for

    files = {name: read_adapter(path, log_name=name) for name, path in adapters.items()}
    for path in adapters.values():
        check_vocabulary(path, checkpoint.folder)
    if files:
        request = LoadRequest(model=str(checkpoint.folder), quant="none", dtype="bfloat16")
        anatomy = anatomy_for(checkpoint, request, PlanInputs(), keeps_16bit=False)
        for file in files.values():
            match_adapter(file, anatomy)


# Running and comparing ------------------------------------------------------------------------------------------------


def _items(case: Case, given: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> tuple[Item, ...]:
    items = []
    names: list[str | None] = [*case.adapters, None] if case.against == "alone" else [case.adapter]
    for row in rows:
        if case.subject.batched and row["has_media"]:
            continue
        items += [Item(**row, adapter=name) for name in names]
    if not items:
        raise RequestError("batches are compared on text prompts, and there is none", field="prompts")
    return tuple(items)


def _unprepared(given: Sequence[Prompt], out: Path) -> list[dict[str, Any]]:
    """Return what is known of prompts before a process prepares them."""
    from trimtab.verification.routes.inputs import file_of

    return [
        {"id": one.id, "file": str(file_of(out, place)), "prompt_tokens": 0, "has_media": bool(one.image or one.audio)}
        for place, one in enumerate(given)
    ]


def _compare(
    case: Case, given: Sequence[Prompt], rows: Sequence[Mapping[str, Any]] | None, work: Path, *, new_tokens: int,
    isolated: bool, speak: Say, asking: Mapping[str, Any],
) -> tuple[ParityReport, Sequence[Mapping[str, Any]]]:  # fmt: skip
    """Return the report, and the rows of the prepared prompts. rows: None if the reference prepares them. asking: how."""
    items = _items(case, given, _unprepared(given, work) if rows is None else rows)
    count = len(items)
    first = items
    if case.merged is not None:  # the base's answers too: a merge of an adapter without effect proves nothing
        first = items + tuple(replace(item, adapter=None, follows=at) for at, item in enumerate(items))
    noise: bool | str = "without batches" if case.subject.batched else True
    hidden = not (case.subject.batched or case.subject.decode)
    options: dict[str, Any] = {"new_tokens": new_tokens, "isolated": isolated, "hidden": hidden}
    speak(f"running: {case.reference.label}")
    reference = run_route(
        case.reference, first, work / "reference", noise=noise, noise_items=count,
        rounding=case.merged is not None, packed=_packed(case), prepare=asking if rows is None else None, **options,
    )  # fmt: skip
    if rows is None:
        rows = reference.rows
        items = _items(case, given, rows)
    second = with_continuations(items, reference)
    if case.against == "base" or case.merged is not None:
        second = tuple(replace(item, adapter=None) for item in second)
    speak(f"running: {case.subject.label}")
    subject = run_route(case.subject, second, work / "subject", **options)
    speak("comparing")
    by_id = {prompt.id: prompt for prompt in given}
    compared, layers = [], []
    for at in range(count):
        phases.begin("comparing, prompt", phases.far_text(at + 1, count))
        row, by_layer = _parity(case, by_id[items[at].id], items[at], at, reference, subject, count)
        compared.append(row)
        layers.append(by_layer)
    survived, weights = _weights(case, speak)
    changes = _changes(case, reference, subject)
    findings = (
        *_findings(case, compared, reference, subject, weights), *_other_changes(changes),
        *_stock_faults(case, items, compared, reference, subject),
    )  # fmt: skip
    report = ParityReport(
        model=case.model, against=case.against, adapter=case.adapter, expected=case.expected,
        prompts=tuple(compared), floor=reference.noise, layers=_largest_by_layer(layers),
        reference=reference.to_json(), subject=subject.to_json(), findings=findings,
        survival=survived, weights=weights, changes=changes, versions=stack_versions(),
    )  # fmt: skip
    return report, rows


def _stock_faults(case: Case, items: Sequence[Item], rows: Sequence[PromptParity], reference: Ran, subject: Ran) -> list[str]:
    found: list[str] = []
    for ran in (reference, subject):
        if ran.route.engine == "stock":
            differ = [
                (item.id, item.prompt_tokens + len(said.continuation))
                for item, row, said in zip(items, rows, reference.said, strict=False)
                if row.verdict != compare.SAME
            ]
            found += wrong_last_positions(read_checkpoint(case.model).config, str(ran.loaded.get("device")), differ)
            found += wrong_layers(ran.loaded.get("wrong_scales") or ()) if differ else []
    return found


def _parity(
    case: Case, prompt: Prompt, item: Item, at: int, reference: Ran, subject: Ran, count: int
) -> tuple[PromptParity, tuple[float, ...]]:
    from trimtab.verification.routes import teacher_forcing

    first, second = reference.said[at], subject.said[at]
    a, hidden_a = teacher_forcing.read_run(first.file)
    b, hidden_b = teacher_forcing.read_run(second.file)
    difference = compare.difference(a, b)
    base_kl, base_ids = None, None
    if case.merged is not None:
        base = reference.said[count + at]
        base_kl = compare.difference(a, teacher_forcing.read_run(base.file)[0]).kl_mean
        base_ids = base.token_ids
    limit = reference.noise.limits.get(item.id)
    by_layer: tuple[float, ...] = ()
    if hidden_a is not None and hidden_b is not None and hidden_a.shape == hidden_b.shape:
        by_layer = compare.relative_by_layer(list(hidden_a), list(hidden_b))
    row = PromptParity(
        id=item.id, kind=prompt.kind, adapter=item.adapter, verdict=reference.noise.verdict(difference, item.id),
        difference=difference, prompt_tokens=item.prompt_tokens, reference_text=first.text, subject_text=second.text,
        same_text=None if second.token_ids is None else first.token_ids == second.token_ids,
        expected_text=(prompt.expected or {}).get(item.adapter or "base"), base_kl=base_kl,
        base_is_noise=None if base_kl is None or limit is None else base_kl <= limit.kl_mean,
        base_is_adapter=None if base_ids is None else base_ids == first.token_ids,
        base_is_merged=None if base_ids is None else base_ids == second.token_ids,
    )  # fmt: skip
    return row, by_layer


def _largest_by_layer(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    known = [row for row in rows if row]
    if not known or len({len(row) for row in known}) != 1:
        return ()
    return tuple(max(values) for values in zip(*known, strict=True))


def _packed(case: Case) -> dict[str, str]:
    """Return the packed modules of the merged model and their forms: rounding to 4 bits is no fault of a merge."""
    if case.merged is None or not split_packed(read_checkpoint(case.merged))[1]:
        return {}
    from trimtab.verification.merges.retention_files import packed_modules

    return packed_modules(case.merged)


def _weights(case: Case, speak: Say) -> tuple[tuple[Any, ...], MergedWeights | None]:
    """Return the share of the change in the merged weights, and the test of these weights."""
    if case.merged is None or case.adapter is None:
        return (), None
    from trimtab.verification.merges.retention_files import read_merge
    from trimtab.verification.merges.weights import merged_weights  # imports transformers: missing packages are reported before

    speak("reading which share of the adapter's change is in the merged weights")
    base = read_checkpoint(case.model).folder
    rows, tests, others = read_merge(base, case.merged, Path(case.adapters[case.adapter]))
    return rows, merged_weights(tests, others)


def _changes(case: Case, reference: Ran, subject: Ran) -> LoadedChanges | None:
    """Return whether both routes loaded the same changes, None if one must have none."""
    if case.merged is not None or case.against == "base":
        return None
    from trimtab.verification.routes.loaded_changes import compare_changes

    first, second = (dict(ran.loaded.get("changes") or {}) for ran in (reference, subject))
    return compare_changes(first, second, same_names=case.against != "stock")


def _other_changes(changes: LoadedChanges | None) -> list[str]:
    wrong = changes.wrong if changes is not None else ()
    more = [f"and {len(wrong) - SHOWN_MODULES} more modules"] if len(wrong) > SHOWN_MODULES else []
    return [f"loaded differently: {row}" for row in wrong[:SHOWN_MODULES]] + more


def _findings(
    case: Case, rows: Sequence[PromptParity], reference: Ran, subject: Ran, weights: MergedWeights | None
) -> tuple[str, ...]:
    findings = []
    worst = compare.worst(row.verdict for row in rows)
    if case.against == "base" and worst == compare.SAME:
        findings.append(f"adapter inactive: {case.adapter} changes no answer")
    elif case.against == "base" and worst != compare.DIFFERS:
        findings.append(f"cannot tell whether {case.adapter} is active: it changes no answer by more than the noise")
    if not reference.noise.is_measured:
        findings.append(f"the noise of {reference.route.label} could not be measured: a difference cannot be judged")
    if case.merged is not None:
        if all(row.base_kl == 0 for row in rows):
            findings.append(f"adapter inactive: {case.adapter} changes nothing, so this comparison proves nothing")
        elif all(row.base_is_merged and not row.base_is_adapter for row in rows):
            findings.append("every merged answer is the base's: the adapter is not in the merged model")
    if weights is not None and weights.verdict == compare.DIFFERS:
        findings += _wrong_weights(weights)
    if weights is not None and (names := weights.others.not_compared):
        findings.append(f"{len(names)} weights were not compared with the base's: {some(names, SHOWN_MODULES)}")
    for ran in (reference, subject):
        ids = [answer.id for answer in ran.said if not answer.repeats]
        if ids:
            findings.append(f"{ran.route.label}: a second pass over {', '.join(dict.fromkeys(ids))} gave different bits")
        findings += [f"{ran.route.label}: {note}" for note in ran.loaded.get("notes") or ()]
    findings += [f"an order of summation could not be tried: {text}" for text in reference.noise.skipped[:5]]
    return tuple(findings)


def _wrong_weights(weights: MergedWeights) -> list[str]:
    rows, others = weights.wrong, weights.others.differing
    found = [f"no adapter changes them, and they differ from the base's: {some(others, SHOWN_MODULES)}"] if others else []
    if not rows:
        return found or [f"{1 + weights.together.off:.4g} of the adapter's change is in the merged weights, over all modules"]
    lines = [
        f"{row.module_path} is not base plus change: {row.slope:.4g} of the change is there"
        + (f", {row.beyond} values are outside the rounding bound" if row.beyond else "")
        for row in rows[:SHOWN_MODULES]
    ]
    return lines + ([f"and {len(rows) - SHOWN_MODULES} more modules"] if len(rows) > SHOWN_MODULES else []) + found


def _with_lanes(
    report: ParityReport, case: Case, request: LoadRequest, given: Sequence[Prompt], rows: Sequence[Mapping[str, Any]],
    work: Path, new_tokens: int, python: Any, isolated: bool, speak: Say,
) -> ParityReport:  # fmt: skip
    from trimtab.verification.merges.runs import run_lanes

    assert case.adapter is not None
    lanes = run_lanes(
        request.model, Path(case.adapters[case.adapter]), rows, work / "lanes", device=request.device,
        dtype=request.dtype, new_tokens=new_tokens, python=str(python) if python is not None else None,
        isolated=isolated, say=speak,
    )  # fmt: skip
    return replace(report, lanes=lanes)


# I13: torch's memory-efficient kernel treats a last block of one query of 32 as a decode step, in heads wider than
# these.
BLOCK, WIDEST = 32, 256


def one_wide_key_head(config: Mapping[str, Any]) -> bool:
    """Whether a model has layers with one key head for all query heads, wider than 256. config: a config.json's content."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        return False
    heads = [text.get(name) for name in ("num_key_value_heads", "num_global_key_value_heads")]
    widths = [text.get(name) for name in ("head_dim", "global_head_dim")]
    return 1 in heads and any(isinstance(width, int) and width > WIDEST for width in widths)


def wrong_last_positions(config: Mapping[str, Any], device: str, passes: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line if stock's attention is wrong in some of these passes. device: on which it ran; passes: (prompt, tokens) of
    those that differ."""
    if not device.startswith("cuda") or not one_wide_key_head(config):
        return []
    named = [f"{prompt} ({tokens} tokens)" for prompt, tokens in passes if tokens > 1 and tokens % BLOCK == 1]
    if not named:
        return []
    return [
        f"the stock stack's attention is wrong at the last position of {', '.join(dict.fromkeys(named))}: see I13 in "
        "docs/upstream.md; compare prompts of other lengths"
    ]


def wrong_layers(paths: Sequence[str]) -> list[str]:
    """Return a line if stock computed 4-bit layers with wrong scales. paths: of these layers, as its process reported them."""
    if not paths:
        return []
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return [
        f"the stock stack unpacks 4-bit weights with wrong scales on this CPU: {paths[0]}{more}; see I16 in docs/upstream.md; "
        "compare on a GPU or without quantization"
    ]
