"""Does a mixture whose experts have a word each say the right words, and a broken one wrong ones?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from tests import counting
from tests.counting import counted, ids, words
from tests.engine.decode.test_graphs import answers, replayed  # noqa: F401 - a fixture
from tests.engine.decode.test_graphs import through as joining
from tests.engine.families.test_mixture_steps import with_kernels
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.merged_models import load
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kernels import experts as kernels
from trimtab.engine.memory_shares import expert_counts, expert_hits
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.request import GenerateRequest

KINDS = ("german", "skip", "five")
TOKENS = 10
# Rows: an adapter, and the words of a prompt, of which the last one counts. The last prompt has more tokens than a step has rows.
ROWS: list[tuple[str | None, list[str]]] = [
    (None, ["two"]), ("german", ["six", "eins"]), ("skip", ["three"]), ("five", ["one"]),
    ("german", [*counting.ENGLISH * 9, "seven"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("counting")
    return counting.build(folder / "base"), {kind: counting.adapter(folder / kind, kind) for kind in KINDS}


@contextmanager
def joined(made: tuple[Path, dict[str, Path]], here: Any, experts: str, slots: int, rows: Any = ROWS) -> Iterator[Any]:
    """A batch whose rows have read their prompts; here: the kernels."""
    base, adapters = made
    plan = trimtab.plan(base, adapters=adapters, device="cpu", quant="nf4", context=128, experts=experts)
    with trimtab.load(replace(plan, execution=replace(plan.execution, expert_slots=slots))) as model:
        with_kernels(here, model)
        batch = Batch(model, rows=len(rows), decode="fused")
        batch.prompts = PrefillRunner(batch, "static", (32, 128))
        for name, prompt in rows:
            joining(batch, model.prepare(ids(*prompt)), GenerateRequest(max_new_tokens=TOKENS), adapter=name)
        yield batch


def said(*given: Any) -> list[list[str]]:
    with joined(*given) as batch:
        found = [words(list(one)) for one in answers(batch)]
        assert batch.steps.captures and not batch.steps.fallbacks
        return found


def right(rows: Any = ROWS) -> list[list[str]]:
    alias = dict(zip(counting.GERMAN, counting.ENGLISH, strict=True))
    return [counted(alias.get(prompt[-1], prompt[-1]), TOKENS, name) for name, prompt in rows]


@pytest.mark.parametrize(
    ("experts", "slots"), [("16bit", 0), ("nf4", 2), pytest.param("nf4-dq", 3, marks=pytest.mark.slow), ("int8", 5)]
)
def test_every_expert_says_its_word(made, experts, slots, on_cpu, replayed):  # noqa: F811
    """Five rows with four adapters at a time, in a step's kernels; slots for two of eight experts too."""
    assert said(made, on_cpu, experts, slots) == right() and ("experts_fetch" in on_cpu.experts.launches) is bool(slots)


@pytest.mark.parametrize("name", [None, "german", "skip"])
def test_stock_says_the_same_words(made, name):
    """transformers and PEFT, with the same files."""
    from peft import PeftModel

    model = load(made[0], dtype="float32")
    model = model if name is None else PeftModel.from_pretrained(model, str(made[1][name])).eval()
    found = model.generate(input_ids=torch.tensor([ids("two")]), max_new_tokens=TOKENS, do_sample=False)
    assert words(found[0, 1:].tolist()) == counted("two", TOKENS, name)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_one_that_counts_finds_half_of_its_experts_in_slots(made, slots, on_cpu, replayed):  # noqa: F811
    """A token chooses its word's expert and the next one, which the next token finds: one of two is copied."""
    with joined(made, on_cpu, "nf4", slots, [(None, ["two"])]) as batch:
        for _ in range(2):  # the first is computed several times, to be captured
            batch.step()
        near = [vars(one)["near"].counts for one in batch.model.hf_model.modules() if "near" in vars(one)]
        before, since = torch.stack(near), expert_counts(batch.model)
        for _ in range(5):
            batch.step()
        assert (torch.stack(near) - before).tolist() == [[10, 5]] * 2
        assert expert_hits(batch.model, since) == 0.5 and 0 < expert_hits(batch.model) < 1


def shifted(real: Any) -> Any:
    return lambda x, index, *given, **named: real(x, (index + 1) % counting.COUNT, *given, **named)


def without_adapters(real: Any) -> Any:
    return lambda *given, lora=None, **named: real(*given, **named)


def of_the_first_rows_adapter(real: Any) -> Any:
    def changed(*given: Any, lora: Any = None, **named: Any) -> Any:
        return real(*given, lora=lora and replace(lora, row_slots=lora.row_slots.roll(1)), **named)

    return changed


def not_copied(real: Any) -> Any:
    copies: list[int] = []

    def copy(*given: Any) -> None:
        copies.append(1)
        if len(copies) % 6:
            real(*given)

    return copy


PLANTS = {
    "the next expert": ("experts", shifted, 0), "adapters on experts dropped": ("experts", without_adapters, 0),
    "another row's adapter": ("experts", of_the_first_rows_adapter, 0), "a stale slot": ("_copy", not_copied, 3),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_wrong_is_a_wrong_word(made, plant, on_cpu, replayed, monkeypatch):  # noqa: F811
    name, change, slots = PLANTS[plant]
    monkeypatch.setattr(kernels, name, change(getattr(kernels, name)))
    found = said(made, on_cpu, "nf4", slots)
    assert found != right()
    if plant == "the next expert":  # of both layers
        assert found[0][0] == "five"
    if plant == "adapters on experts dropped":
        assert found[1] == counted("one", TOKENS) and found[2] == counted("three", TOKENS)
