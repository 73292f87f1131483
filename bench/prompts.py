"""How long a prompt takes to its first token: captured, one kernel after the other, and stock, in one run on one GPU.

    python -m bench.prompts --work FOLDER --save bench/results/prompts.json [--models e4b,e2b,...] [--engines trimtab,stock]
    python -m bench.prompts --work FOLDER --save FILE --models e4b --engines trimtab --card-gib 4

Checkpoints are bench.checkpoints' random ones, NF4 with double quantization, a rank-8 adapter on language and towers. Each model
and engine is a process of its own; they load beside each other and are measured one after the other. What the file to be saved
has rows of is not run again. A row: `tokens` of the prompt,
`adapter`, `way` ("captured", "eager", "stock"), `ms` to the first token (median of five), `gpu_ms` of the graph's replays
alone, `difference` of the scores from the eager ones' in parts of their largest, `same_token`. The row "picture 640x480" begins
with the bytes of a PNG file and a question: decoding, resizing and the processor are in it, no picture comes twice. `--card-gib`: a
second process holds the rest of the device, the plan places layers as it does on such a card, and answers are the public API's:
`way` "planned", with the seconds that the plan predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import environment, generated, median_ms, parser_of, save, saved, timed_s
from bench.memory import prepared_apart

LENGTHS = (64, 512, 2048)
CONTEXT = 2560
MODELS = ("e4b", "e2b", "qwen3-8b", "qwen3-vl-4b")
REPEAT = 5
PICTURE_TOKENS = 280
PICTURES = 40


def prepare(size: str, work: Path) -> None:
    """Make a checkpoint and its adapter, in a process of its own, unless they are there."""
    has_eyes = not size.startswith("e") or (work / size / "processor_config.json").is_file()
    if has_eyes and (work / f"{size}-r8" / "adapter_config.json").is_file():
        return
    give = f"from bench.prompts import give_eyes; give_eyes(work / {size!r})"
    prepared_apart(size, work, (8,), give if size.startswith("e") else "")


def give_eyes(folder: Path) -> None:
    """Give a random checkpoint of Gemma 4 a tokenizer and the family's processor: pictures of 280 tokens."""
    from bench import voices

    voices.give(folder)
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    values["image_seq_length"] = values["image_processor"]["max_soft_tokens"] = PICTURE_TOKENS
    path.write_text(json.dumps(values))


def pictures(work: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield messages with a picture of 640x480 each and a question, all different; the files are made before the first one."""
    from bench.load_bodies import png

    chance = random.Random(5)
    paths = [work / f"picture-{os.getpid()}-{number}.png" for number in range(PICTURES)]
    for path in paths:
        path.write_bytes(png(chance))
    for path in paths:
        part = {"type": "image", "image": str(path)}
        yield [{"role": "user", "content": [part, {"type": "text", "text": "What is in this picture?"}]}]


def ms_of(call: Any) -> float:
    return round(median_ms(call, REPEAT), 2)


def device_bytes() -> dict[str, int]:
    """Return what torch has reserved on the device, and what else this process and the others have taken there."""
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {"torch": reserved, "others": total - free - reserved}


def wait() -> None:
    """Say that everything is loaded, and wait for this process's turn."""
    go = os.environ.get("TRIMTAB_BENCH_GO")
    print("READY", flush=True)
    while go and not Path(go).exists():
        time.sleep(0.05)


# trimtab -----------------------------------------------------------------------------------------------------------------


class Bench:
    """Times prompts of one loaded model."""

    def __init__(self, model: Any, size: str) -> None:
        from trimtab.request import GenerateRequest

        self.model, self.size, self.rows = model, size, []
        self.request = GenerateRequest(max_new_tokens=4)

    def batch(self, mode: str) -> Any:
        from trimtab.engine.batch.batch import Batch
        from trimtab.engine.prefill.prefill import PrefillRunner

        batch = Batch(self.model, rows=1, decode=mode)
        batch.prompts = PrefillRunner(batch, mode)
        batch.ends = frozenset()
        return batch

    def once(self, batch: Any, inputs: Any, adapter: str | None) -> Any:
        """Put one prompt through and draw its first token; returns its scores. inputs: ready, or what makes them."""
        inputs = inputs() if callable(inputs) else inputs
        prompt = batch.begin(inputs, self.request, adapter=adapter).compute()
        scores = prompt.logits
        batch.leave(batch.join(prompt).row)
        return scores

    def row(self, what: str, inputs: Any, adapter: str | None, batches: dict[str, Any]) -> None:
        """Add the rows of one prompt: eager first, then captured beside it."""
        import torch

        expected = None
        for way, batch in batches.items():
            row: dict[str, Any] = {
                "model": self.size, "engine": "trimtab", "what": what,
                "tokens": (inputs() if callable(inputs) else inputs).prompt_tokens,
                "adapter": adapter is not None, "way": way,
            }  # fmt: skip
            self.rows.append(row)
            try:
                for _ in range(3):  # as it is, captured, replayed
                    scores = self.once(batch, inputs, adapter).clone()
                if callable(inputs):  # another prompt each time: no scores to compare
                    expected = scores
                if way != "eager" or adapter is not None:
                    row["ms"] = ms_of(lambda batch=batch: self.once(batch, inputs, adapter))
                if expected is None:
                    expected = scores
                row |= {
                    "difference": float(f"{float((scores - expected).abs().max() / expected.abs().max()):.2e}"),
                    "same_token": bool(scores.argmax() == expected.argmax()),
                    "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
                }
                if way == "captured":
                    row |= self.replays(batch)
            except Exception as exc:
                row["error"] = f"{type(exc).__name__}: {exc}"[:300]
            print("ROW " + json.dumps(row), flush=True)

    def parts(self, made: Any, batch: Any, what: str = "parts of a picture") -> None:
        """Add a row of what the time of a picture consists of: inputs on the host, towers, the prompt."""
        rows = []
        for _ in range(REPEAT):
            start = time.perf_counter()
            inputs = made()
            inputs_ms = (time.perf_counter() - start) * 1000
            prompt = batch.begin(inputs, self.request, adapter="r8")
            rows.append([inputs_ms, 1000 * timed_s(prompt.step), 1000 * timed_s(prompt.step)])
            batch.leave(batch.join(prompt).row)
        towers = batch.prompts.towers
        names = ("inputs_ms", "towers_ms", "prompt_ms")
        self.rows.append({
            "model": self.size, "engine": "trimtab", "what": what,
            **{name: round(statistics.median(column), 2) for name, column in zip(names, zip(*rows, strict=True), strict=True)},
            "layers_captured": towers.captured, "capture_s": round(towers._graphs.capture_s, 2),
            "buffer_bytes": towers.buffer_bytes,
        })  # fmt: skip
        print("ROW " + json.dumps(self.rows[-1]), flush=True)

    def replays(self, batch: Any) -> dict[str, Any]:
        """Return the milliseconds that the graphs of the last prompt take by themselves, and what was captured."""
        import torch

        captured = batch.prompts._graphs
        last = next(reversed(captured), None)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found: dict[str, Any] = {"graphs": len(captured), "capture_s": round(captured.capture_s, 2)}
        found["fallbacks"] = [f"{one.what}: {one.why}" for one in batch.steps.fallbacks]
        if last is not None and self.model.streamer is None:
            start.record()
            for _ in range(5):
                captured[last].graph.replay()
            end.record()
            end.synchronize()
            found |= {"last_graph": str(last[0]), "gpu_ms": round(start.elapsed_time(end) / 5, 2)}
        return found

    def profile(self, inputs: Any, adapter: str | None, batch: Any) -> None:
        """Print where the GPU's time goes in one prompt."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.once(batch, inputs, adapter)
            torch.cuda.synchronize()
        events = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
        total = sum(one.self_device_time_total for one in events)
        count = sum(one.count for one in events if one.self_device_time_total)
        print(f"PROFILE {self.size} {inputs.prompt_tokens} {adapter}: {total / 1000:.2f} ms in {count} kernels")
        for one in events[:24]:
            print(f"  {one.self_device_time_total / 1000:8.3f} ms {one.count:6d} x  {one.key[:110]}")


def run_trimtab(size: str, work: Path, lengths: Sequence[int], *, profile: bool) -> list[dict[str, Any]]:
    import torch

    import trimtab
    from bench.checkpoints import media_inputs, text_inputs
    from trimtab.engine.kv.sequence import Inputs

    plan = trimtab.plan(
        work / size, adapters={"r8": work / f"{size}-r8"}, context=CONTEXT, images=1, audio_s=10.0, quant="nf4-dq",
        place={"*": "resident"},
    )  # fmt: skip
    with trimtab.load(plan, decode="eager") as model:
        bench, config = Bench(model, size), model.hf_model.config
        eager = bench.batch("eager")
        captured = bench.batch("auto")
        wait()
        before = device_bytes()
        for tokens in lengths:
            ids = text_inputs(config, tokens, device="cpu")["input_ids"][0].tolist()
            ids = [token % min(config.get_text_config().vocab_size - 2000, 100000) + 1000 for token in ids]
            for adapter in ("r8", None):
                bench.row("text", model.prepare(ids), adapter, {"eager": eager, "captured": captured})
        if size.startswith("e"):
            tensors = media_inputs(config, device="cuda")
            tensors = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in tensors.items()}
            ids = tensors["input_ids"][0].tolist()
            inputs = Inputs(tensors, len(ids), tuple(ids), has_media=True)
            bench.row("picture and sound", inputs, "r8", {"eager": eager, "captured": captured})
            messages = pictures(work)

            def made() -> Inputs:
                return model.prepare(next(messages))

            bench.row("picture 640x480", made, "r8", {"eager": eager, "captured": captured})
            bench.parts(made, captured)
        torch.cuda.empty_cache()
        taken = {name: count - before[name] for name, count in device_bytes().items()}
        memory = {
            "counted_bytes": captured.prompts.extra_bytes(), "sizes": captured.prompts.sizes, "taken_bytes": taken,
            "graphs": len(captured.prompts._graphs), "kernels_us": captured.prompts.kernels().measured_us,
        }  # fmt: skip
        bench.rows.append({"model": size, "engine": "trimtab", "what": "memory", **memory})
        print("ROW " + json.dumps(bench.rows[-1]), flush=True)
        if size.startswith("e"):
            plain = bench.batch("auto")
            plain.prompts.kernels()
            plain.prompts._tower_ops = None  # before a prompt: graphs are not made again
            bench.parts(made, plain, "parts of a picture, its towers as transformers and bitsandbytes compute them")
        if profile:
            for tokens in lengths:
                ids = [1000 + number for number in range(tokens)]
                for adapter in ("r8", None):
                    for _ in range(2):
                        bench.profile(model.prepare(ids), adapter, captured)
    return bench.rows


def run_small(size: str, work: Path, lengths: Sequence[int]) -> None:
    """Print the rows of a card that holds less than the whole model, through the public API."""
    import trimtab
    from bench.turns import token_ids

    plan = trimtab.plan(work / size, adapters={"r8": work / f"{size}-r8"}, context=CONTEXT, images=1, audio_s=10.0, quant="nf4-dq")
    off = [row for row in plan.placements if row.part in ("language", "head") and row.tier != "resident"]
    with trimtab.load(plan) as model:
        about = {
            "model": size, "engine": "trimtab", "way": "planned", "mode": plan.execution.prompt.mode,
            "head": plan.execution.head, "streamed_gib": round(sum(one.host_bytes for one in off) / 2**30, 3),
            "planned_ms": round(plan.execution.prompt.seconds * 1000, 1),
            "planned_tokens": plan.request.context_tokens - plan.answer_tokens,
        }  # fmt: skip
        wait()
        for tokens in lengths:
            ids = token_ids(tokens, 0, int(model.hf_model.config.get_text_config().vocab_size))
            for adapter in ("r8", None):
                row = {**about, "what": "text", "tokens": len(ids), "adapter": adapter is not None}
                print("ROW " + json.dumps(row | asked_ms(model, lambda ids=ids: ids, adapter)), flush=True)
        if size.startswith("e"):
            messages = pictures(work)
            row = {**about, "what": "picture 640x480", "adapter": True}
            row["tokens"] = model.prepare(next(messages)).prompt_tokens
            print("ROW " + json.dumps(row | asked_ms(model, lambda: next(messages), "r8")), flush=True)
        fallbacks = [f"{one.what}: {one.why}" for one in model.fallbacks]
        print("ROW " + json.dumps({**about, "what": "memory", **model.memory(), "fallbacks": fallbacks}), flush=True)


def asked_ms(model: Any, prompt: Any, adapter: str | None) -> dict[str, float]:
    """Return the median milliseconds to the first token, from the prompt itself on."""

    def ask() -> None:
        model.answer(prompt(), adapter=adapter, max_new_tokens=1)

    for _ in range(3):
        ask()
    return {"ms": ms_of(ask)}


# Stock -------------------------------------------------------------------------------------------------------------------


def run_stock(size: str, work: Path, lengths: Sequence[int]) -> list[dict[str, Any]]:
    import torch
    import transformers

    from bench.checkpoints import text_inputs
    from trimtab.stock.load import load_adapter, load_base, quantization

    model = load_base(work / size, dtype=torch.bfloat16, device_map={"": 0}, quantization_config=quantization("nf4-dq"))
    peft_model = load_adapter(model, work / f"{size}-r8")
    rows = []
    wait()
    for tokens in lengths:
        ids = text_inputs(model.config, tokens, device="cuda")["input_ids"] % 100000 + 1000
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        generated(peft_model, given, 1)
        rows.append({
            "model": size, "engine": "stock", "what": "text", "tokens": tokens, "adapter": True, "way": "stock",
            "ms": ms_of(lambda given=given: generated(peft_model, given, 1)),
        })  # fmt: skip
        print("ROW " + json.dumps(rows[-1]), flush=True)
    if size.startswith("e"):
        processor = transformers.AutoProcessor.from_pretrained(work / size)
        messages = pictures(work)

        def seen() -> int:
            given = processor.apply_chat_template(
                next(messages), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
            ).to("cuda")
            generated(peft_model, given, 1)
            return int(given["input_ids"].shape[1])

        tokens = seen()
        rows.append({
            "model": size, "engine": "stock", "what": "picture 640x480", "tokens": tokens, "adapter": True,
            "way": "stock", "ms": ms_of(seen),
        })  # fmt: skip
        print("ROW " + json.dumps(rows[-1]), flush=True)
    return rows


# One run -----------------------------------------------------------------------------------------------------------------


class Case:
    """One model and engine in a process of its own, which loads at once and measures when it may."""

    def __init__(self, size: str, engine: str, given: argparse.Namespace) -> None:
        self.size, self.engine = size, engine
        self.go, self.log = (given.work / f"{engine}-{size}.{end}" for end in ("go", "log"))
        self.go.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.prompts", "--work", str(given.work), "--case", f"{engine}:{size}"]
        command += ["--lengths", given.lengths, "--card-gib", str(given.card_gib)]
        command += ["--profile"] if given.profile else []
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TRIMTAB_BENCH_GO": str(self.go)}
            )

    def is_ready(self) -> bool:
        return self.process.poll() is not None or "READY" in self.log.read_text()

    def rows(self, timeout_s: float) -> list[dict[str, Any]]:
        """Let it measure; returns its rows, the last one with an error if it failed."""
        self.go.touch()
        rows: list[dict[str, Any]] = []
        try:
            failed = f"exit code {self.process.wait(timeout_s)}" if self.process.wait(timeout_s) else ""
        except subprocess.TimeoutExpired:
            self.process.kill()
            failed = f"longer than {timeout_s} s"
        lines = self.log.read_text().splitlines()
        for line in lines:
            if line.startswith("ROW ") and line.endswith("}"):
                rows.append({"model": self.size, **json.loads(line[4:])})
        if failed:
            print(f"{self.engine} {self.size}: {failed}", *lines[-12:], sep="\n", flush=True)
            rows.append({"model": self.size, "engine": self.engine, "error": f"{failed}: {(lines or ['?'])[-1][:300]}"})
        print(*[line for line in lines if line.startswith(("PROFILE", "  "))], sep="\n", flush=True)
        return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the first-token times as lines of text: a model, a length and an adapter each, the three ways beside each other."""
    names = f"{'stock':>8} {'eager':>8} {'captured':>8} {'planned':>8} {'gpu':>7} {'differ':>8}"
    lines = [f"{'model':12} {'what':18} {'tokens':>6} {'adapter':7} {names}"]
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "way" in row and "tokens" in row:
            key = row["model"], row["what"], row["tokens"], row["adapter"]
            groups.setdefault(key, {})[row["way"]] = row
    for (model, what, tokens, adapter), ways in groups.items():
        ms = [f"{ways.get(way, {}).get('ms', '-'):>8}" for way in ("stock", "eager", "captured", "planned")]
        captured = ways.get("captured", {})
        lines.append(
            f"{model:12} {what:18} {tokens:>6} {'yes' if adapter else 'no':7} {' '.join(ms)} "
            f"{captured.get('gpu_ms', '-'):>7} {captured.get('difference', '-'):>8}"
        )
    return "\n".join(lines + [f"{row['model']} {row['engine']}: {row['error']}" for row in rows if "error" in row])


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default="trimtab,stock")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of the texts")
    parser.add_argument("--card-gib", type=float, default=0.0, help="of the device's memory, what one model at a time may use")
    parser.add_argument("--timeout-s", type=float, default=150)
    parser.add_argument("--profile", action="store_true", help="print where the GPU's time goes")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        import warnings

        warnings.filterwarnings("ignore")
        engine, _, size = given.case.partition(":")
        lengths = [int(tokens) for tokens in given.lengths.split(",")]
        if engine == "stock":
            run_stock(size, given.work, lengths)
        elif given.card_gib:
            run_small(size, given.work, lengths)
        else:
            run_trimtab(size, given.work, lengths, profile=given.profile)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = saved(given.save).get("rows", [])
    wanted = [
        (size, engine) for size in given.models.split(",") for engine in given.engines.split(",")
        if not any((row["model"], row["engine"]) == (size, engine) and "error" not in row for row in rows)
    ]  # fmt: skip
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda size: prepare(size, given.work), dict.fromkeys(size for size, _ in wanted)))
    if given.card_gib:
        from bench.cards import GIB, Holder

        holder = Holder()
        holder.leave(int(given.card_gib * GIB))
    begun: dict[tuple[str, str], Case] = {}
    if not given.card_gib:
        begun = {one: Case(*one, given) for one in wanted}
        until = time.monotonic() + given.timeout_s
        while time.monotonic() < until and not all(case.is_ready() for case in begun.values()):
            time.sleep(0.1)
    for one in wanted:
        case = begun.get(one) or Case(*one, given)
        rows = [row for row in rows if (row["model"], row["engine"]) != (case.size, case.engine)]
        rows += case.rows(given.timeout_s)
        save(given.save, {"environment": environment(), "rows": rows})
    if given.card_gib:
        holder.close()
    print(table(rows))
    if any("error" in row for row in rows):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
