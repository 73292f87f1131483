"""`trimtab demo`: plan under a budget that the model does not fit, load, apply adapters, answer, verify."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab import demo
from trimtab.adapter_names import KNOWS
from trimtab.errors import CheckpointError, DoesNotFitError, ParityError, gib
from trimtab.planning.plan.chart import draw
from trimtab.report.render import WIDTH, Lines
from trimtab.request import LoadRequest
from trimtab.verification.routes.alarm_rate import DRAWS, FALSE_ALARM_RATE

if TYPE_CHECKING:
    from trimtab.verification.routes.compare import Noise, NoiseFloor
    from trimtab.verification.routes.loaded_changes import Changes

Say = Callable[[str], None]
ADAPTERS = tuple(demo.ADAPTERS)
FOLDER = demo.FOLDER
GET_IT_BACK = "Install trimtab again. In a source tree run `git checkout -- trimtab/demo`, or tools/train_demo.py"
# The last lines of the demo. Each runs as it is, in any folder.
NEXT = (
    "trimtab chat demo --adapter demo/style",
    "trimtab serve demo --adapter demo/style",
    "trimtab merge demo demo-with-style --adapter demo/style --check",
)
CONTEXT_TOKENS = 512
NEW_TOKENS = 48


@dataclass(frozen=True)
class Ask:
    """One question of the demo: its adapter (None: the base), its image or audio, and the right answer."""

    kind: str
    prompt: str
    media: dict[str, Any]
    adapter: str | None
    expected: str


def run(say: Say, placed: LoadRequest | None = None) -> dict[str, Any]:
    """Return the plan, the answers and the comparison, after printing them step by step.

    placed: budgets of the split model, and dtype and device of both; a tight budget by default. Errors: ParityError if
    a logit of the split model differs from the all-resident model's by more than noise; CheckpointError, with how to
    get it back, if a file of the bundled model is missing or damaged.
    """
    check_files()
    try:
        return _run(say, placed or LoadRequest(model=str(FOLDER / "base")))
    except CheckpointError as exc:
        if exc.hint == GET_IT_BACK or not exc.path.startswith(str(FOLDER)):
            raise
        raise CheckpointError(
            f"the bundled model is damaged ({exc})", path=exc.path, tensor_name=exc.tensor_name, hint=GET_IT_BACK
        ) from exc


def check_files() -> None:
    """Raise CheckpointError if a file of the demo is missing."""
    adapters = [f"adapters/{name}/adapter_model.safetensors" for name in ADAPTERS]
    needed = ["prompts.jsonl", "base/config.json", "base/model.safetensors.index.json", "base/tokenizer.json", *adapters]
    missing = [name for name in needed if not (FOLDER / name).is_file()]
    if missing:
        raise CheckpointError(f"the bundled model is incomplete, missing: {', '.join(missing)}", path=FOLDER, hint=GET_IT_BACK)


def _run(say: Say, placed: LoadRequest) -> dict[str, Any]:
    options: dict[str, Any] = {
        "adapters": {name: FOLDER / "adapters" / name for name in ADAPTERS}, "context": CONTEXT_TOKENS,
        "images": 1, "audio_s": 1.0, "head": "full", "dtype": placed.dtype, "device": placed.device,
    }  # fmt: skip
    asks = read_asks(list(options["adapters"]))
    say("A small Gemma 4 for text, images and audio (see CARD.md), with three adapters.")
    say(f"files: {FOLDER}\n")
    whole = trimtab.plan(FOLDER / "base", place={"*": "resident"}, **options)
    split = _split_plan(whole, options, placed)
    peaks = [gib(plan.gpu_peak_bytes) for plan in (whole, split)]
    say(f"1. plan: peak on {whole.execution_device} with every weight resident {peaks[0]}, split {peaks[1]}\n")
    say(Lines(WIDTH).show(split.document()))
    picture = new_picture()
    draw(split, picture)
    say(f"\nchart of the plan: {picture}\n")
    say("2. load, and run the base and each adapter")
    answers, logits, changes = _answers(split, asks, say)
    say("\n3. verify: the same prompts on the model with every weight resident")
    _, expected, expected_changes = _answers(whole, asks, None)
    check_changes(changes, expected_changes)
    largest = compare(logits, expected)
    positions = sum(len(of_prompt) for of_prompt in logits)
    say(f"   {len(asks)} prompts, {positions} positions: largest difference of a logit {largest:g}")
    verdict, noise = _judge(whole, asks, logits, expected, say) if largest else ("same", None)
    say(f"   {verdict}")
    say(f"\n{KNOWS}")
    say("\n".join(["next:", *(f"    {command}" for command in NEXT)]))
    tiers = list(split.tiers().values())
    return {
        "folder": str(FOLDER), "picture": str(picture), "resident_peak_bytes": whole.gpu_peak_bytes,
        "split_peak_bytes": split.gpu_peak_bytes,
        "tiers": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
        "answers": answers, "positions": positions, "max_abs": largest, "same": largest == 0,
        "verdict": verdict, "noise": noise,
    }  # fmt: skip


def check_changes(changes: Changes, expected: Changes) -> None:
    """Raise ParityError if the split model has loaded another weight change than the resident one. This is more sensitive than
    answers."""
    from trimtab.verification.routes.loaded_changes import compare_changes

    compared = compare_changes(expected, changes)
    if compared is not None and compared.wrong:
        raise ParityError(
            f"the split model did not load the same adapters as the resident one: {compared.wrong[0]}", position=-1,
            max_abs=0.0, mean_abs=0.0, tolerance=0.0, hint=f"{len(compared.wrong)} modules are wrong",
        )  # fmt: skip


def new_picture() -> Path:
    """Return a new empty file for the chart of this run's plan. Other users and other runs have their own files."""
    handle, path = tempfile.mkstemp(prefix="trimtab-demo-plan-", suffix=".svg")
    os.close(handle)
    return Path(path)


def _judge(
    whole: trimtab.Plan, asks: Sequence[Ask], logits: Sequence[Any], expected: Sequence[Any], say: Say
) -> tuple[str, dict[str, Any]]:
    """Return the verdict on logits that are not equal bit for bit, and the resident model's noise on which it is based. Errors:
    ParityError if a difference is larger."""
    places = [place for place, (a, b) in enumerate(zip(logits, expected, strict=True)) if not a.equal(b)]
    say("   not bit-equal: measuring the noise of the resident model")
    floor = judge(_noise(whole, {str(place): asks[place] for place in places}), asks, logits, expected)
    return "same within noise", floor.to_json()


def judge(noise: Sequence[Noise], asks: Sequence[Ask], logits: Sequence[Any], expected: Sequence[Any]) -> NoiseFloor:
    """Return the noise floor that bounds the differences of all asks. noise: of each position that differs, by index.

    Errors: ParityError if a difference is more than that.
    """
    from trimtab.verification.routes.compare import NoiseFloor, difference

    floor = NoiseFloor(tuple(noise))
    for place in range(len(asks)):
        if logits[place].equal(expected[place]):
            continue
        apart = difference(expected[place], logits[place])
        if floor.verdict(apart, str(place)) == "same within noise":
            continue
        limit = floor.limits.get(str(place))
        raise ParityError(
            f"the split model differs from the resident one on the {asks[place].kind} prompt",
            position=apart.first_position or 0, max_abs=apart.max_abs, mean_abs=apart.mean_abs,
            tolerance=limit.max_abs if limit is not None else 0.0,
            hint=f"The tolerance is a bound on the resident model's own noise; false-alarm rate {FALSE_ALARM_RATE:.0e}",
        )  # fmt: skip
    return floor


def _noise(plan: trimtab.Plan, asks: Mapping[str, Ask]) -> tuple[Noise, ...]:
    with trimtab.load(plan) as model:
        return tuple(pair for name, ask in asks.items() for pair in ask_noise(model, name, ask))


def ask_noise(model: trimtab.LoadedModel, name: str, ask: Ask) -> tuple[Noise, ...]:
    """Return the differences of a model's logits on one ask if each layer's roundings are random."""
    from trimtab.verification.routes.compare import drawn_noise
    from trimtab.verification.routes.teacher_forcing import ONCE, rounded_layers

    once = model.logits(ask.prompt, **ask.media, adapter=ask.adapter)
    draws = {}
    for seed in range(1, DRAWS + 1):
        with rounded_layers(model.hf_model, seed):
            draws[f"every layer rounded at random ({seed})"] = model.logits(ask.prompt, **ask.media, adapter=ask.adapter)
    return drawn_noise(name, ONCE, once, draws)


def read_asks(adapters: Sequence[str]) -> list[Ask]:
    """Return the first question of each kind, to the base and to every adapter with an answer to it."""
    first: dict[str, dict[str, Any]] = {}
    for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        first.setdefault(values["kind"], values)
    asks = []
    for kind, values in first.items():
        media: dict[str, Any] = {name: str(FOLDER / values[name]) for name in ("image", "audio") if name in values}
        voices: dict[str | None, str] = {None: "base", **{name: name for name in adapters}}
        asks += [
            Ask(kind, values["prompt"], media, adapter, values["answers"][voice])
            for adapter, voice in voices.items()
            if voice in values["answers"]
        ]
    return asks


def _split_plan(whole: trimtab.Plan, options: Mapping[str, Any], placed: LoadRequest) -> trimtab.Plan:
    """Return the plan of a given budget, else one with gathered tables and streamed blocks, for a budget slightly above the
    smallest."""
    options = {**options, "host_memory": placed.host_memory_bytes}
    if placed.gpu_memory_bytes is not None:
        return trimtab.plan(FOLDER / "base", gpu_memory=placed.gpu_memory_bytes, **options)
    try:
        trimtab.plan(FOLDER / "base", gpu_memory=1, **options)
    except DoesNotFitError as exc:
        tight_bytes = exc.needed_bytes + (whole.gpu_needed_bytes - exc.needed_bytes) // 16
    split = trimtab.plan(FOLDER / "base", gpu_memory=tight_bytes, **options)
    if "stream" in split.tiers().values():
        return split
    # A model can be smaller than the loading buffers of one block that leaves: then the tiers are requested.
    return trimtab.plan(FOLDER / "base", place={"*": "stream", "table": "gather"}, **options)


def _answers(plan: trimtab.Plan, asks: Sequence[Ask], say: Say | None) -> tuple[list[dict[str, Any]], list[Any], Changes]:
    """Return the answers (none without say), the teacher-forced logits [S, V] of every question, and the loaded changes."""
    from trimtab.verification.routes.trimtab_run import own_changes

    answers, logits = [], []
    with trimtab.load(plan) as model:
        for ask in asks:
            if say is not None:
                answers.append(_answer(model, ask, say))
            logits.append(model.logits(ask.prompt, **ask.media, adapter=ask.adapter))
        changes = own_changes(model)
    return answers, logits, changes


def _answer(model: trimtab.LoadedModel, ask: Ask, say: Say) -> dict[str, Any]:
    answer = model.answer(ask.prompt, **ask.media, adapter=ask.adapter, max_new_tokens=NEW_TOKENS)
    who = ask.adapter or "base"
    wrong = "" if answer.text == ask.expected else f"   (expected: {ask.expected})"
    say(f"   {ask.kind:5}  {who:11}  {ask.prompt} -> {answer.text}{wrong}")
    return {
        "kind": ask.kind, "adapter": ask.adapter, "prompt": ask.prompt, "text": answer.text, "expected": ask.expected,
        "tokens_per_s": answer.tokens_per_s,
    }  # fmt: skip


def compare(compared_logits: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest absolute difference of two lists of logits; 0.0 only if every bit is the same."""
    largest = 0.0
    for one, other in zip(compared_logits, expected, strict=True):
        if not one.equal(other):
            difference = float((one - other).abs().max())
            # NaN in one or both is never equal.
            largest = max(largest, difference if difference > 0 else math.inf)
    return largest
