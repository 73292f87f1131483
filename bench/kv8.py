"""What 8-bit keys and values change and, on a GPU, take: KL against full ones, bytes, and the time of a step.

    python -m bench.kv8 --save bench/results/kv8.json                                          (the demo; adds to the file)
    python -m bench.kv8 --work FOLDER --model e4b --rows 8 --context 4096 --save FILE          (a GPU: steps and bytes)
    python -m bench.kv8 --folder MODEL --prompts FILE.jsonl                                    (your model and prompts)

"demo": its 18 prompts (6 images, 6 sounds, 6 texts) and the greedy answers of full keys and values, teacher-forced, without an
adapter and with each of three. "token" is what `--kv int8` computes: a scale for each token and head. "channel" is an experiment:
keys have a scale for each head and channel over the whole text, which nobody has while the text is being written; values as before.
"random": tiny models of random weights and the real classes, 200 random tokens, in float32.

`--save` replaces the run of the same case on the same device (the GPU's name, null for a CPU) and keeps all others.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import trimtab
from bench import environment, parser_of, save, saved
from bench.head8 import ADAPTERS, DEMO, prompts
from trimtab.engine.kv import kv_cache
from trimtab.engine.kv.int8 import read_states, round_states
from trimtab.engine.memory import reserve
from trimtab.verification.routes.teacher_forcing import extended, forget_request

NEW_TOKENS = 32
RANDOM_TOKENS = 200
COUNTS = (8, 1)
# Of a run: the comparison of answers on the demo (with random models), on a model of yours, or steps and bytes on a GPU.
KINDS = ("demo", "own", "steps")


class ChannelCache(DynamicCache):
    """A cache for one pass of a whole text: keys rounded by head and channel, values by token and head."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        wide = key_states.float()
        scale = (wide.abs().amax(dim=-2, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        keys = ((wide / scale).round().clamp(-127, 127) * scale).to(key_states.dtype)
        values = read_states(round_states(value_states), value_states.dtype)
        return super().update(keys, values, *args, **kwargs)


def caches(hf_model: Any) -> dict[str, Callable[[], Any]]:
    """Return the caches that are compared, by name."""
    config = hf_model.config.get_text_config()
    return {
        "full": lambda: kv_cache.prompt_cache(hf_model),
        "token": lambda: kv_cache.prompt_cache(hf_model, "int8"),
        "channel": lambda: ChannelCache(config=config),
    }


def logits_of(hf_model: Any, inputs: Mapping[str, Tensor], cache: Any) -> Tensor:
    """Return the logits [S, V] of a whole text in one pass, each position's from the keys and values as the cache keeps them."""
    forget_request(hf_model)
    with torch.no_grad():
        return hf_model(**inputs, past_key_values=cache, use_cache=True).logits[0].double().cpu()


def kl(whole: Tensor, other: Tensor) -> Tensor:
    """Return KL(whole || other) of every position [S] in float64."""
    a, b = whole.log_softmax(-1), other.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


class Sums:
    """Divergences of positions as they come."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.agreed = 0

    def add(self, whole: Tensor, other: Tensor) -> None:
        self.kl += kl(whole, other).tolist()
        self.agreed += int((whole.argmax(-1) == other.argmax(-1)).sum())

    def row(self) -> dict[str, Any]:
        return {
            "positions": len(self.kl), "kl_mean": float(f"{sum(self.kl) / len(self.kl):.3g}"),
            "kl_max": float(f"{max(self.kl):.3g}"), "top1_agreement": round(self.agreed / len(self.kl), 5),
        }  # fmt: skip


@contextmanager
def kept_in(model: Any, kv: str) -> Iterator[None]:
    """Let a loaded model answer with another form of keys and values."""
    before = model.plan
    model.plan = replace(before, request=replace(before.request, kv=kv))
    model.forget_batch()
    try:
        yield
    finally:
        model.plan = before
        model.forget_batch()


def compared(
    folder: Path, quant: str, adapter: tuple[str, Path] | None, asked: list[dict[str, Any]], dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Compare the forms over prompts and the answers to them."""
    adapters = dict([adapter] if adapter else [])
    plan = trimtab.plan(folder, adapters=adapters, quant=quant, dtype=dtype, context=1024, head="full")
    with trimtab.load(plan) as model:
        sums = {name: Sums() for name in ("token", "channel")}
        same, name = 0, adapter[0] if adapter else None
        for one in asked:
            media = {kind: one[kind] for kind in ("image", "audio") if kind in one}
            answer = model.answer(one["text"], **media, adapter=name, max_new_tokens=NEW_TOKENS)
            with kept_in(model, "int8"):
                small = model.answer(one["text"], **media, adapter=name, max_new_tokens=NEW_TOKENS)
            same += small.token_ids == answer.token_ids
            whole = extended(model.prepare(one["text"], **media).tensors, answer.token_ids)
            model.adapter_store.set(name)
            logits = {form: logits_of(model.hf_model, whole, cache()) for form, cache in caches(model.hf_model).items()}
            model.adapter_store.none()
            for form, one_sum in sums.items():
                one_sum.add(logits["full"], logits[form])
        return {
            "quant": quant, "dtype": dtype, "adapter": name, "prompts": len(asked), "same_answers": same,
            **{form: one.row() for form, one in sums.items()},
        }  # fmt: skip


def random_models() -> list[dict[str, Any]]:
    """Compare the forms on tiny random models of the families' classes."""
    from tests import pico

    found = []
    for family in ("gemma4", "gemma3n", "gemma3", "llama", "qwen3", "qwen3_vl", "mixtral"):
        with tempfile.TemporaryDirectory() as folder:
            plan = trimtab.plan(pico.build(family, Path(folder)), quant="none", dtype="float32", context=512, device="cpu")
            with trimtab.load(plan) as model:
                generator = torch.Generator().manual_seed(1)
                ids = torch.randint(5, 300, (1, RANDOM_TOKENS), generator=generator)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                logits = {form: logits_of(model.hf_model, inputs, cache()) for form, cache in caches(model.hf_model).items()}
        row: dict[str, Any] = {"family": family}
        for form in ("token", "channel"):
            sums = Sums()
            sums.add(logits["full"], logits[form])
            row[form] = sums.row()
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def steps(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure captured steps and bytes of both forms on a GPU, every row behind a prompt that fills half of its context."""
    from bench.cards import prepare

    prepare(given.model, given.work)
    found: list[dict[str, Any]] = []
    logits: dict[int, Tensor] = {}
    for kv in ("full", "int8"):
        found += steps_of(given, kv, logits)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def steps_of(given: argparse.Namespace, kv: str, logits: dict[int, Tensor]) -> list[dict[str, Any]]:
    """Return the rows of one form. logits: by number of rows, of the first form."""
    from bench.together import filled, ids, step_ms

    found = []
    plan = trimtab.plan(
        given.work / given.model, quant="nf4-dq", context=given.context, batch=given.rows, device="cuda", images=0,
        audio_s=0.0, kv=kv,
    )  # fmt: skip
    with trimtab.load(plan) as model:
        batch = filled(model, given.rows, given.context // 2, 64)
        going = list(batch.active)
        for number, row in enumerate(going):  # both forms go on after the same token, whatever a random model says
            row.token_ids[-1] = ids(1, number)[0]
        for count in COUNTS:
            if count > given.rows:
                continue
            batch.active[:] = going[:count]
            batch.write_last_tokens()
            made = batch.steps.run(batch.state())[0].double().cpu()
            batch.write_last_tokens()
            found.append({
                "model": given.model, "kv": kv, "mode": plan.execution.step.mode, "rows": count,
                "context": given.context, "written": given.context // 2, "ms": step_ms(batch),
                # Of all rows with full contexts; a part of it is an estimate.
                "planned_ms": round(plan.token_s * 1e3, 3) if count == given.rows else None,
                "estimated_ms": round(plan.execution.step.estimated_s * 1e3, 3) if count == given.rows else None,
                "kl_mean": float(kl(logits.setdefault(count, made), made).mean()),
                "kv_bytes": batch.cache.nbytes(), "planned_kv_bytes": plan.gpu["kv_cache"],
                "planned_activation_bytes": plan.gpu["activations"], "planned_bytes": plan.gpu_needed_bytes,
                "peak_bytes": torch.cuda.max_memory_allocated(), "planned_peak_bytes": plan.gpu_peak_bytes,
                # What graphs hold is no longer allocated: torch has it reserved.
                "reserved_bytes": torch.cuda.memory_reserved(), "planned_torch_bytes": reserve.torch_bytes(plan),
                "planned_copy_bytes": plan.gpu.get("kv_copies", 0),
                "fallbacks": [f"{one.what}: {one.why}" for one in batch.steps.fallbacks],
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def case_of(run: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return what a run measured and on which GPU: its kind, its case as JSON, and the GPU's name, None for a CPU."""
    kind = next(name for name in KINDS if name in run)
    return kind, json.dumps(run.get("case"), sort_keys=True), run["environment"]["gpu"]


def add(path: Path | None, run: Mapping[str, Any]) -> None:
    """Add a run to a file of results. It replaces the run of the same case on the same GPU; all others stay."""
    save(path, {"runs": [*(old for old in saved(path).get("runs", []) if case_of(old) != case_of(run)), run]})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--model", default="e4b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--prompts", type=Path, help="lines of {'text': ...} and optional image and audio files")
    parser.add_argument("--quant", default="nf4-dq")
    given = parser.parse_args()
    run: dict[str, Any] = {"environment": environment(system=platform.system())}
    if given.folder is not None:
        run["case"] = {"model": given.folder.name, "prompts": given.prompts.name, "quant": given.quant}
        asked = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines()]
        run["own"] = compared(given.folder, given.quant, None, asked)
        print(json.dumps(run["own"]), flush=True)
    elif given.work is not None:
        run["case"] = {"model": given.model, "rows": given.rows, "context": given.context}
        run["steps"] = steps(given)
    else:
        run["demo"] = []
        for quant, dtype in (("nf4-dq", "bfloat16"), ("none", "bfloat16"), ("none", "float32")):
            for adapter in ADAPTERS:
                one = None if adapter is None else (adapter, DEMO / "adapters" / adapter)
                run["demo"].append(compared(DEMO / "base", quant, one, prompts(), dtype))
                print(json.dumps(run["demo"][-1]), flush=True)
        run["random"] = random_models()
    add(given.save, run)


if __name__ == "__main__":
    main()
