"""Loads a planned model for a command: the tokenizer first, then the weights, then a note on slower fallbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trimtab
from trimtab.adapters.file import peft_folder, weights_beside
from trimtab.checkpoint.folder import GENERATION, find_folder
from trimtab.cli.flags.output import print_text
from trimtab.process import before_torch, phases
from trimtab.request import LoadRequest

if TYPE_CHECKING:
    from trimtab.engine.batch.generate import Answer

ENDED_AT_ONCE = "the answer is empty: the model ended it immediately"
STOPPED_AT_ONCE = "the answer is empty: it ended immediately, by a stop text or by the model"


def planned(source: trimtab.Plan | LoadRequest) -> trimtab.Plan:
    """Return the plan of a model that will be loaded. What needs no torch to be found wrong is found before it is imported."""
    from trimtab.api import PlanInputs, plan_request

    return plan_request(source, inputs=PlanInputs(is_to_load=True)) if isinstance(source, LoadRequest) else source


@contextmanager
def opened(
    plan: trimtab.Plan, decode: str, *, stop_at_turn_end: bool | None = None, is_told: bool = True
) -> Iterator[trimtab.LoadedModel]:
    """Yield the model of a plan, loaded. decode: "auto" is the plan's mode. stop_at_turn_end: as for
    `control_tokens.stop_at_turn_end`. is_told: whether to print a note if answers continue after a turn. Errors: of
    `trimtab.load`."""
    phases.begin_imports()
    from trimtab.engine.chat import control_tokens
    from trimtab.engine.loader.processor import load_processor

    phases.begin("reading the tokenizer")
    # A folder without a tokenizer is detected before its weights are loaded for minutes.
    processor = load_processor(find_folder(plan.request.model))
    before_torch.keep_imports()
    model = trimtab.load(plan, decode=None if decode == "auto" else decode)
    before_torch.collect_again()
    model.processor = processor
    missing = control_tokens.stop_at_turn_end(model, is_asked=stop_at_turn_end)
    if missing is not None and is_told:
        print_text(control_tokens.going_on(missing, "--stop-at-turn-end"), file=sys.stderr)
    phases.begin("")
    with model:
        yield model


def say_beside(adapters: Mapping[str, str]) -> None:
    """Print on stderr which other weights in the adapters' folders are unused. adapters: name -> folder of the read
    adapters."""
    for name, path in adapters.items():
        for note in weights_beside(peft_folder(path))[1]:
            print_text(f"adapter {name}: {note}", file=sys.stderr)


def say_fallbacks(model: trimtab.LoadedModel) -> None:
    """Print the slower fallbacks on stderr."""
    for one in model.fallbacks:
        how = "" if one.what == GENERATION else "slower than it could be: "
        print_text(f"{how}{one.what}: {one.why}", file=sys.stderr)


def end_text(answer: Answer, context_tokens: int, *, has_stop_texts: bool) -> str | None:
    """Return the note on an empty or shortened answer, None for any other."""
    tokens = len(answer.token_ids)
    if answer.text.strip():
        if answer.finish_reason != "length":
            return None
        is_full = answer.prompt_tokens + answer.max_new_tokens >= context_tokens
        why = f"the context of {context_tokens} is full; --context sets it" if is_full else "--max-new-tokens sets the limit"
        return f"the answer was cut after {tokens} tokens: {why}"
    if tokens <= 1 and answer.finish_reason == "stop":
        return STOPPED_AT_ONCE if has_stop_texts else ENDED_AT_ONCE
    return f"the answer has no text: {tokens} tokens, ended by {answer.finish_reason!r}"
