"""On which questions do the adapter and its base differ most?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import RequestError
from trimtab.verification.routes import prompts as asked
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.server.channels import Question
from trimtab.verification.server.local import Reference

TEXTS = 16  # the sign test needs this many for a false alarm below 1 in 1000 (verdict.py)
PER_TOWER = 12
GENERATED = 24
MARKER = "marker"
# A question with a smaller difference of adapter and base proves nothing about the adapter.
LEAST_KL = 1e-4
GENERAL = (
    "Write one sentence about the sea.", "What is your name?", "Give me a recipe for bread.", "Say hello in three languages.",
    "Explain why the sky is blue.", "What should I do today?", "Continue: once upon a time", "List three animals.",
)  # fmt: skip
LOOKED = ("What is shown?", "Describe the picture.")
HEARD = ("What do you hear?", "Describe the sound.")


@dataclass(frozen=True)
class Chosen:
    """A question and the distance of adapter and base on it, in nats per token."""

    question: Question
    kl: float


def candidates(
    reference: Reference, given: Sequence[Prompt] | None, *, is_demo: bool, config: dict[str, Any], work: Path
) -> list[Question]:
    """Return every candidate question. given: the user's, which then replace all others except generated texts."""
    if given is not None:
        prompts = list(given)
    elif is_demo:
        prompts = [*_demo_prompts(), *_general(reference)]
    else:
        prompts = [*asked.built_in(Path(reference.model.plan.request.model), config, work), *_general(reference)]
    questions = []
    for prompt in prompts:
        try:
            questions.append(reference.question(prompt))
        except RequestError:
            if given is not None:
                raise
    # Equal questions would count one observation twice.
    distinct = {(one.ids, one.image, one.audio): one for one in reversed([*questions, *_generated(reference)])}
    return list(reversed(distinct.values()))


def _demo_prompts() -> list[Prompt]:
    prompts = []
    for line in (asked.DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        media: dict[str, Any] = {name: str(asked.DEMO / row[name]) for name in ("image", "audio") if name in row}
        texts = [row["prompt"], *(LOOKED if "image" in media else HEARD if "audio" in media else ())]
        for place, text in enumerate(dict.fromkeys(texts)):
            prompts.append(Prompt(f"{row['id']}{f'-{place}' if place else ''}", text, **media))
    return prompts


def _general(reference: Reference) -> list[Prompt]:
    if not hasattr(reference.tokenizer, "decode"):
        return []
    return [Prompt(f"general_{place}", text) for place, text in enumerate(GENERAL, 1)]


def _generated(reference: Reference) -> list[Question]:
    """Return questions in the domain of base and adapter: user turns that the base writes, and starts of texts that both
    write."""
    tokenizer = reference.tokenizer
    special = set(tokenizer.all_special_ids)
    start = [token for token in (tokenizer.bos_token_id,) if token is not None] or [0]
    before = _before_a_turn(reference)
    questions = []
    for seed in range(GENERATED):
        is_turn = before is not None and seed % 4 != 0
        name = reference.adapter if seed % 8 == 0 else None
        tokens = reference.sample(before if is_turn and before else start, name, seed=seed)
        kept = _until(tokens, special) if is_turn else [token for token in tokens if token not in special]
        if len(kept) < 4:
            continue
        if is_turn:
            questions.append(reference.question(Prompt(f"generated_{seed + 1}", tokenizer.decode(kept).strip())))
        else:
            questions.append(reference.raw_question(f"generated_{seed + 1}", [*start, *kept[: len(kept) // 2]]))
    return questions


def _before_a_turn(reference: Reference) -> list[int] | None:
    """Return the tokens before the text of a user turn, None without a chat template."""
    if not getattr(reference.tokenizer, "chat_template", None):
        return None
    question = reference.question(Prompt("marker", MARKER))
    before, marker, _ = (question.text or "").partition(MARKER)
    return list(reference.tokenizer(before, add_special_tokens=False)["input_ids"]) if marker and before else None


def _until(tokens: Sequence[int], ends: set[int]) -> list[int]:
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:place])


def choose(reference: Reference, questions: Sequence[Question], new_tokens: int) -> list[Chosen]:
    """Return the most informative questions, texts first, then per tower, ordered within each kind. The measure is the KL
    divergence between adapter and base along the adapter's answer."""
    rated = [Chosen(question, _kl(reference, question, new_tokens)) for question in questions]
    rated.sort(key=lambda one: -one.kl)
    chosen = [one for one in rated if one.question.kind == "text"][:TEXTS]
    for kind in ("image", "audio"):
        chosen += [one for one in rated if kind in one.question.kind][:PER_TOWER]
    return [one for one in chosen if one.kl >= LEAST_KL]


def _kl(reference: Reference, question: Question, new_tokens: int) -> float:
    """Return the KL divergence in nats per token along the adapter's own answer; 0 if that answer is empty, because a server's
    output does not show an end token."""
    tokens = reference.greedy(question, reference.adapter, new_tokens)
    special = set(reference.tokenizer.all_special_ids)
    if sum(token not in special for token in tokens) < 2:
        return 0.0
    with_it = reference.logprobs(question, tokens, reference.adapter)
    without = reference.logprobs(question, tokens, None)
    return float(torch.sum(with_it.exp() * (with_it - without), dim=-1).mean())
