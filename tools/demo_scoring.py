"""How often the bundled demo model is right: greedy answers to held-out questions, exact text or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_adapters import ADAPTERS, load_adapter
from demo_data import Ask, asks_inputs, held_out_asks
from demo_forward import KINDS

NEW_TOKENS = 40
# What the card promises: the voice itself at least this, the base without the adapter at most that.
LEAST_RIGHT, MOST_WITHOUT = 0.95, 0.10


def load_base(folder: Path, device: str) -> Any:
    """Return the bundled base in bf16 as `from_pretrained` reads it."""
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)


@torch.no_grad()
def greedy(
    model: Any, tokenizer: Any, asks: Sequence[Ask], *, rows: int = 60, tick: Callable[[int], None] = lambda n: None
) -> list[str]:
    """Return the model's greedy answer to each ask."""
    device, dtype = next(model.parameters()).device, torch.bfloat16
    answers: dict[int, str] = {}
    for kind in KINDS:
        numbers = [number for number, ask in enumerate(asks) if ask.kind == kind]
        for start in range(0, len(numbers), rows):
            chunk = numbers[start : start + rows]
            inputs = asks_inputs(tokenizer, [asks[number] for number in chunk])
            inputs = {
                name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
                for name, tensor in inputs.items()
            }
            made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            new = made[:, inputs["input_ids"].shape[1] :]
            answers.update(zip(chunk, tokenizer.batch_decode(new, skip_special_tokens=True)))
            tick(len(chunk))
    return [answers[number].strip() for number in range(len(asks))]


def share(right: Sequence[bool], asks: Sequence[Ask]) -> dict[str, float]:
    """Return the share of right answers of each kind and of all."""
    shares = {"all": sum(right) / len(right)}
    for kind in KINDS:
        of_kind = [good for good, ask in zip(right, asks) if ask.kind == kind]
        if of_kind:
            shares[kind] = sum(of_kind) / len(of_kind)
    return {kind: round(value, 4) for kind, value in shares.items()}


def evaluate(demo: Path, *, device: str = "cpu", tick: Callable[[int], None] = lambda n: None) -> dict[str, Any]:
    """Return for each voice the share of right answers, for each adapter also the base's share on the same questions.

    `mistakes` lists every wrong answer (question, expected, given).
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo / "base")
    base = load_base(demo / "base", device)
    asks = held_out_asks("base")
    given = dict(zip(asks, greedy(base, tokenizer, asks, tick=tick)))
    results: dict[str, Any] = {"base": _result(asks, [given[ask] for ask in asks], "base")}
    for voice in ADAPTERS:
        if not (demo / "adapters" / voice).exists():
            continue
        asks = held_out_asks(voice)
        unknown = [ask for ask in asks if ask not in given]
        given.update(zip(unknown, greedy(base, tokenizer, unknown, tick=tick)))
        adapted = load_adapter(load_base(demo / "base", device), voice, demo / "adapters" / voice)
        results[voice] = _result(asks, greedy(adapted, tokenizer, asks, tick=tick), voice)
        without = share([given[ask] == ask.answer(voice) for ask in asks], asks)
        results[voice]["base_without_it"] = without
    return results


def _result(asks: Sequence[Ask], given: Sequence[str], voice: Any) -> dict[str, Any]:
    right = [reply == ask.answer(voice) for ask, reply in zip(asks, given)]
    mistakes = [
        {"kind": ask.kind, "question": ask.question.text, "expected": ask.answer(voice), "given": reply}
        for ask, reply, good in zip(asks, given, right)
        if not good
    ]
    return {"questions": len(asks), "right": share(right, asks), "mistakes": mistakes}


def shortfalls(results: dict[str, Any]) -> list[str]:
    """Return what falls short of the card's promises; empty if nothing does."""
    short = []
    for voice, result in results.items():
        for kind, value in result["right"].items():
            if value < LEAST_RIGHT:
                short.append(f"{voice} answers {value:.1%} of {kind} right, not {LEAST_RIGHT:.0%}")
        for kind, value in result.get("base_without_it", {}).items():
            if value > MOST_WITHOUT:
                short.append(f"the base without {voice} answers {value:.1%} of its {kind} right, over {MOST_WITHOUT:.0%}")
    return short
