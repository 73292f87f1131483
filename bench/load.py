"""How a server does under load, stock beside it: time to first text, time between pieces, tokens a second, errors.

    python -m bench.load --save bench/results/load_cpu.json                               (the demo model, on a CPU)
    python -m bench.load --work FOLDER --size e4b --adapters 8 --device cuda --quant nf4-dq --save bench/results/load.json
                         --seconds 6 --max-tokens 32 --rates 0.5 4                        (random weights; a GPU)
    python -m bench.load --work FOLDER --size e4b --device cuda --quant nf4-dq --text-tokens 512 --max-tokens 128 --seconds 25
                         --skip-s 10 --share 0.7 --engines trimtab                        (512 in, 128 out, one table)

Closed loop: N clients, each asks again as soon as it is answered. Open loop: requests arrive at random at a rate, whether
the server keeps up or not. Both draw the same questions, text, pictures and sounds in turn, to every adapter. A cell lasts
`--seconds`; what is unanswered then is cut and counted as `unfinished`, which flatters the times of a server that leaves
many: theirs are not in the percentiles. The first `--skip-s` seconds of a cell are not counted: tokens are those that came
later, times those of requests that began later; the clients of a closed loop begin one after the other within half of them.
All servers run, and each cell of one follows the same cell of the other, so that what else the machine does meets both.
`--engines trimtab stock transformers`: the last one is `transformers serve --continuous-batching` (bench.transformers_server),
which serves no adapters: its rows are of the base model. `--others-seconds`: cells of the engines beside trimtab.
`--alone-tokens N`: before each closed loop as many clients ask at once for N tokens each; `alone_ms` is their gaps while all of
them are answered and no prompt is computed, and `p99_steps` the 99th percentile under load in medians of these.
`--outside`: two cells more around each closed loop. "outside", in front of it, counts as a newcomer's script does: whole answers,
sampled (a request without a temperature has 1), complete answers over all of the time, the clients' start and the last answers
included. Behind it the same closed loop is sampled, which shows what sampling costs.
Gaps are between pieces of text; stock's streamer holds back the word that may go on. Time to first text counts from before
the connection is made, queueing included. Adapters of the random checkpoint are
of rank 8 on language, vision and audio modules; its words mean nothing, their costs do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench import client, environment, load_bodies, parser_of, save, saved, voices
from bench.client import Asked
from bench.served import Served
from bench.transformers_server import ENGINE, TransformersServed
from trimtab.demo.demo import FOLDER, read_asks

CLIENTS = (1, 8, 32)
RANK = 8
WARM_TOKENS = 8
TEXTS = 512  # texts of a run, no two the same
STOCK_ADAPTERS = ("style", "rslora-dora")


@dataclass
class Cell:
    """What one load did. asked: those that ended. cut: those that the end of the cell cut, with what they had got. skip_s: the
    beginning that is not counted. Both hold (when it began, in seconds of the cell, how it went)."""

    seconds: float
    skip_s: float = 0.0
    start: float = field(default_factory=time.monotonic)
    asked: list[tuple[float, Asked]] = field(default_factory=list)
    cut: list[tuple[float, Asked]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, address: str, body: dict[str, Any], end: float) -> None:
        began = time.monotonic()
        left_s = end - began
        if left_s <= 0:
            return
        found = client.ask(address, body, timeout_s=left_s + 0.05, on_piece=lambda _: time.monotonic() < end)
        with self.lock:
            (self.cut if found.ended in ("left", "hang") else self.asked).append((began - self.start, found))

    def row(self) -> dict[str, Any]:
        complete = [pair for pair in self.asked if pair[1].ended == "complete"]
        begun = complete + self.cut
        errors = Counter(one.error or one.ended for _, one in self.asked if one.ended != "complete")
        tokens = sum(self._tokens(at, one) for at, one in begun)
        late = [one for at, one in begun if at >= self.skip_s]
        first = [1000 * one.ttft_s for one in late if one.ttft_s is not None]
        ended = [one for at, one in complete if at + one.total_s >= self.skip_s]
        return {
            "ttft_ms": client.percentiles(first, digits=1),
            "between_ms": client.percentiles([1000 * gap for one in late for gap in one.gaps_s], digits=2),
            "tok_s": round(tokens / (self.seconds - self.skip_s), 1), "requests": len(ended), "unfinished": len(self.cut),
            "prompt_tokens": max((one.prompt_tokens for one in ended), default=0), "errors": dict(sorted(errors.items())),
        }  # fmt: skip

    def _tokens(self, at: float, one: Asked) -> float:
        """Return how many tokens of an answer came after the beginning that is not counted."""
        if one.ttft_s is None:
            return 0.0
        times = list(accumulate(one.gaps_s, initial=at + one.ttft_s))
        each = one.completion_tokens / len(times) if one.completion_tokens else 1.0  # a piece may be more than one token
        return each * sum(time_s >= self.skip_s for time_s in times)


def closed(
    address: str, bodies: Sequence[dict[str, Any]], *, clients: int, seconds: float, skip_s: float = 0.0
) -> Cell:  # fmt: skip
    """Return what N clients got that ask one question after the other."""
    cell = Cell(seconds, skip_s)
    end = cell.start + seconds

    def run(number: int) -> None:
        time.sleep(skip_s / 2 * number / clients)
        for body in _shuffled(bodies, number):
            if time.monotonic() >= end:
                return
            cell.ask(address, body, end)

    _join([threading.Thread(target=run, args=(number,), daemon=True) for number in range(clients)])
    return cell


def outside(
    address: str, bodies: Sequence[dict[str, Any]], *, clients: int, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """Return the row of clients that count by themselves: see `--outside`."""
    found: list[Asked] = []
    start = time.monotonic()

    def run(number: int) -> None:
        time.sleep(0.06 * number)
        for body in _shuffled(bodies, number):
            if time.monotonic() >= start + seconds:
                return
            plain = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "temperature")}
            found.append(client.ask(address, plain, timeout_s=120))

    _join([threading.Thread(target=run, args=(number,), daemon=True) for number in range(clients)])
    elapsed_s, ended = time.monotonic() - start, [one for one in found if one.ended == "complete"]
    return {
        "ttft_ms": None, "between_ms": None, "answer_ms": client.percentiles([1000 * one.total_s for one in ended], digits=1),
        "tok_s": round(sum(one.completion_tokens for one in ended) / elapsed_s, 1), "requests": len(ended), "unfinished": 0,
        "prompt_tokens": max((one.prompt_tokens for one in ended), default=0), "elapsed_s": round(elapsed_s, 2),
        "errors": dict(Counter(one.error or one.ended for one in found if one.ended != "complete")),
    }  # fmt: skip


def opened(
    address: str, bodies: Sequence[dict[str, Any]], *, rate: float, seconds: float, skip_s: float = 0.0
) -> Cell:  # fmt: skip
    """Return what requests got that arrive at random, `rate` a second, answered or not."""
    cell = Cell(seconds, skip_s)
    start = cell.start
    chance, asks, at_s = random.Random(0), _shuffled(bodies, 0), 0.0
    threads = []
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        arguments = (start + at_s, next(asks))
        threads.append(threading.Thread(target=_later, args=(cell, address, *arguments, start + seconds), daemon=True))
    _join(threads)
    return cell


def alone(address: str, bodies: Sequence[dict[str, Any]], *, clients: int, tokens: int) -> dict[str, float] | None:
    """Return the ms between pieces of as many answers as there are clients, while all of them come and no prompt is computed."""
    found: list[tuple[float, Asked]] = []

    def run(body: dict[str, Any]) -> None:
        began = time.monotonic()
        found.append((began, client.ask(address, {**body, "max_tokens": tokens})))

    asks = [body for body, _ in zip(_shuffled(bodies, 0), range(clients), strict=False)]
    _join([threading.Thread(target=run, args=(body,), daemon=True) for body in asks])
    times = [list(accumulate(one.gaps_s, initial=began + one.ttft_s)) for began, one in found if one.ttft_s is not None]
    if len(times) < clients:
        return None
    last_first, first_last = max(one[0] for one in times), min(one[-1] for one in times)
    gaps = [
        1000 * (after - before)
        for one in times for before, after in zip(one, one[1:], strict=False)
        if last_first <= before and after <= first_last
    ]  # fmt: skip
    return client.percentiles(gaps, digits=2)


def _later(cell: Cell, address: str, at: float, body: dict[str, Any], end: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
    cell.ask(address, body, end)


def _shuffled(bodies: Sequence[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Yield every question equally often, in an order of this client's own."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(bodies, len(bodies))


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# What is served -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What every server serves. context: tokens. reads_only: whether it takes texts alone."""

    name: str
    folder: Path
    adapters: dict[str, Path]
    context: int
    audio_s: float
    reads_only: bool = False


def demo() -> Model:
    """Return the demo model with those of its adapters that stock loads: the third changes a wrapped module of a tower."""
    return Model("demo", FOLDER / "base", {name: FOLDER / "adapters" / name for name in STOCK_ADAPTERS}, 512, 1.0)


def sized(
    size: str, work: Path, count: int, *, device: str, context: int = 1024, audio_s: float = 1.0
) -> Model:  # fmt: skip
    """Return a random checkpoint of a size with `count` adapters, made where it is not there yet."""
    from bench import checkpoints

    folder = work / f"{size}-talking"
    if not (folder / "tokenizer.json").exists():
        checkpoints.write_checkpoint(size, folder, device=device)
        voices.give(folder)
    adapters = {f"a{number}": work / f"{size}-a{number}" for number in range(count)}
    first = work / f"{size}-a0"
    if not (first / "adapter_config.json").exists():
        checkpoints.write_adapter(folder, first, RANK)
    for number, path in enumerate(adapters.values()):
        if not (path / "adapter_config.json").exists():
            turned(first, path, number)
    return Model(size, folder, adapters, context, audio_s, reads_only=size in checkpoints.READERS)


def turned(first: Path, path: Path, number: int) -> None:
    """Write an adapter of its own, made of another one's numbers."""
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.roll(number, -1) for name, tensor in load_file(first / "adapter_model.safetensors").items()}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy(first / "adapter_config.json", path / "adapter_config.json")


def questions(model: Model, max_tokens: int) -> list[dict[str, Any]]:
    """Return text, picture and sound, each to the base and to every adapter."""
    media = {ask.kind: ask for ask in read_asks([])}
    return [
        client.chat_body(
            ask.prompt, model=adapter, max_tokens=max_tokens,
            **{kind: Path(path).read_bytes() for kind, path in ask.media.items()},
        )
        for ask in media.values()
        if not (model.reads_only and ask.media)
        for adapter in (model.name, *model.adapters)
    ]  # fmt: skip


def servers(model: Model, given: argparse.Namespace) -> dict[str, Callable[[], Served]]:
    """Return how each engine's server is started."""
    adapters = [word for name, path in model.adapters.items() for word in ("--adapter", f"{name}={path}")]
    shared = [str(model.folder), *adapters, "--device", given.device, "--quant", given.quant, "--dtype", given.dtype]
    ours = [
        *shared, "--name", model.name, "--context", str(model.context), "--audio-s", str(model.audio_s),
        *(("--rows", str(given.rows)) if given.rows else ()), "--queue", "256", *given.serve,
    ]  # fmt: skip
    return {
        "trimtab": lambda: Served(ours),
        "stock": lambda: Served(shared, command=("-m", "bench.stock_server")),
        ENGINE: lambda: TransformersServed(model.folder, device=given.device, quant=given.quant, dtype=given.dtype),
    }


def warm(server: Served, bodies: Sequence[dict[str, Any]], *, most_tokens: int | None = None) -> None:
    """Ask one question of each kind. most_tokens: of its answer (None: as asked). Errors: RuntimeError if one is not answered."""
    for body in bodies[:: max(1, len(bodies) // 3)]:
        short = body if most_tokens is None else {**body, "max_tokens": min(most_tokens, body["max_tokens"])}
        first = client.ask(server.address, server.body_of(short), timeout_s=120)
        if first.ended != "complete":
            raise RuntimeError(f"not answered: {first}\n{server.log[-3000:]}")


def how(server: Served) -> str:
    """Return what a server says of the way in which it runs, empty for another engine."""
    numbers = server.status().get("numbers", {})
    names = ("rows", "prompt_chunks", "captures", "capture_s", "fallbacks", "counts")
    return json.dumps({name: numbers[name] for name in names if name in numbers})


def times(engine: str, given: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a cell of an engine, and those at its beginning that are not counted."""
    if engine == "trimtab":
        return given.seconds, given.skip_s
    seconds = given.seconds if given.others_seconds is None else given.others_seconds
    return seconds, min(given.skip_s if given.others_skip_s is None else given.others_skip_s, seconds)


def cells_of(given: argparse.Namespace) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for count in given.clients:
        closed_loop = {"loop": "closed", "clients": count}
        around = given.outside
        cells += [{"loop": "outside", "clients": count}] * around + [closed_loop] + [{**closed_loop, "temperature": 1.0}] * around
    return cells + [{"loop": "open", "rate": rate} for rate in given.rates]


def measure(
    server: Served, bodies: Sequence[dict[str, Any]], what: dict[str, Any], seconds: float, skip_s: float = 0.0,
    alone_tokens: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return one cell's row, once the server has nothing more to do."""
    load_before = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    sampled = {"temperature": what["temperature"]} if "temperature" in what else {}
    bodies = [dict(server.body_of({**body, **sampled})) for body in bodies]
    if what["loop"] == "outside":
        row = outside(server.address, bodies, clients=what["clients"], seconds=seconds)
        server.wait_quiet(60.0)
        return {**what, "seconds": seconds, "skip_s": 0.0, **row, "load_before": load_before}
    steps = None
    if what["loop"] == "closed":
        if alone_tokens:
            steps = alone(server.address, bodies, clients=what["clients"], tokens=alone_tokens)
        cell = closed(server.address, bodies, clients=what["clients"], seconds=seconds, skip_s=skip_s)
    else:
        cell = opened(server.address, bodies, rate=what["rate"], seconds=seconds, skip_s=skip_s)
    server.wait_quiet(60.0)
    row = {**what, "seconds": seconds, "skip_s": skip_s, **cell.row(), "load_before": load_before}
    if steps and row["between_ms"]:
        row |= {"alone_ms": steps, "p99_steps": round(row["between_ms"]["p99"] / steps["p50"], 2)}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, help="where the random checkpoint is, or is made")
    parser.add_argument("--size", help="of bench.checkpoints: a random checkpoint in place of the demo")
    parser.add_argument("--adapters", type=int, default=8, help="of the random checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quant", default="none", choices=["none", "nf4", "nf4-dq"])
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rows", type=int, default=None, help="default: as the server plans")
    parser.add_argument("--context", type=int, default=1024, help="of the random checkpoint")
    parser.add_argument("--text-tokens", type=int, help="texts of so many tokens, no two the same, instead of the demo's")
    parser.add_argument("--mixed", action="store_true", help="with --text-tokens: a quarter pictures, a quarter sounds")
    parser.add_argument("--skip-s", type=float, default=0.0, help="the beginning of a cell that is not counted")
    parser.add_argument(
        "--share",
        type=float,
        help="one more cell of the first engine: requests arrive at this share of its last closed loop's rate",
    )
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument(
        "--rates", type=float, nargs="*", help="requests a second of the open loop (default: 3 and 10; none with --share)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each cell")
    parser.add_argument("--others-seconds", type=float, help="of each cell of the engines beside trimtab (default: the same)")
    parser.add_argument("--others-skip-s", type=float, help="the beginning of those that is not counted (default: the same)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--alone-tokens", type=int, default=0, help="of answers without prompts beside them (default: none)")
    parser.add_argument("--outside", action="store_true", help="also what an outsider counts, and the closed loops sampled")
    parser.add_argument("--apart", action="store_true", help="one engine after the other, where both do not fit together")
    parser.add_argument("--engines", nargs="*", default=["trimtab", "stock"])
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `trimtab serve`, last")
    parser.add_argument("--add", action="store_true", help="keep the rows that the file of --save has from earlier runs")
    given = parser.parse_args(arguments)
    if given.dtype is None:
        given.dtype = "float32" if given.device == "cpu" else "bfloat16"
    if given.size and not given.work:
        parser.error("--size needs --work")
    if given.rates is None:
        given.rates = [] if given.share else [3.0, 10.0]
    if given.text_tokens and not given.size:
        parser.error("--text-tokens needs --size")
    audio_s = float(load_bodies.SOUND_S) if given.mixed else 1.0
    model = (
        sized(given.size, given.work, given.adapters, device=given.device, context=given.context, audio_s=audio_s)
        if given.size
        else demo()
    )
    bodies = bodies_of(model, given)
    groups = [[engine] for engine in given.engines] if given.apart else [given.engines]
    rows: list[dict[str, Any]] = []
    kept = saved(given.save).get("rows", []) if given.add else []
    names = ("seconds", "max_tokens", "rows", "dtype", "apart", "text_tokens", "mixed", "skip_s", "share", "context")
    about = {"environment": environment(given.device), "settings": {name: getattr(given, name) for name in names}}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        save(given.save, {**about, "rows": [*kept, *rows]})  # a run that is cut leaves what it has measured
        print(row["failed"] if "failed" in row else json.dumps(row), file=sys.stderr if "failed" in row else None, flush=True)

    for group in groups:
        _group(group, model, bodies, given, keep)
    print(table(rows), flush=True)
    if all("failed" in row for row in rows):
        raise SystemExit(1)


def bodies_of(model: Model, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the questions of a run."""
    if not given.text_tokens:
        return questions(model, given.max_tokens)
    make = load_bodies.mixed if given.mixed else load_bodies.texts
    models = list(model.adapters) or [model.name]
    count = TEXTS if not given.mixed else TEXTS // 4
    return make(load_bodies.words_of(model.folder), models, count=count, tokens=given.text_tokens, max_tokens=given.max_tokens)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a short text table."""
    lines = [
        f"{'engine':12} {'load':>12} {'tok/s':>8} {'ttft p50/p99 ms':>18} {'between p50/p99 ms':>20} {'done':>5} {'cut':>4} errors"
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['engine']:12} failed: {row['failed'][-300:]}")
            continue
        kind = "outside" if row["loop"] == "outside" else "sampled" if row.get("temperature") else "clients"
        load = f"{row['clients']} {kind}" if "clients" in row else f"{row['rate']:.2f} a s"
        first, between = row["ttft_ms"] or {}, row["between_ms"] or {}
        lines.append(
            f"{row['engine']:12} {load:>12} {row['tok_s']:>8.1f} {_pair(first):>18} {_pair(between):>20} {row['requests']:>5} "
            f"{row['unfinished']:>4} {row['errors'] or ''}"
        )
    notes = {row["engine"]: row["note"] for row in rows if row.get("note")}
    lines += [f"{engine}: {note}" for engine, note in notes.items()]
    return "\n".join(lines)


def _pair(values: dict[str, float]) -> str:
    return f"{values.get('p50', 0):.1f} / {values.get('p99', 0):.1f}"


def _group(
    engines: Sequence[str], model: Model, bodies: Sequence[dict[str, Any]], given: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Measure engines that run at the same time, each cell of one after the same cell of the other; `keep` gets the rows."""
    rows: list[dict[str, Any]] = []
    running: dict[str, tuple[dict[str, Any], Served]] = {}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        keep(row)

    with ExitStack() as stack:
        for engine in engines:
            about = {"engine": engine, "model": model.name, "adapters": len(model.adapters), "quant": given.quant}
            about |= {"text_tokens": given.text_tokens, "mixed": given.mixed, "max_tokens": given.max_tokens}
            start = time.monotonic()
            try:
                server = stack.enter_context(servers(model, given)[engine]())
                about["ready_s"] = round(time.monotonic() - start, 1)
                # An answer of others can take 16 s, and their first steps capture nothing.
                warm(server, bodies, most_tokens=None if engine == "trimtab" else WARM_TOKENS)
                about |= server.notes()
                running[engine] = (about, server)
            except Exception as exc:
                add({**about, "failed": f"{type(exc).__name__}: {exc}"[-2000:]})
        for what in cells_of(given):
            for about, server in running.values():
                add({**about, **measure(server, bodies, what, *times(about["engine"], given), given.alone_tokens)})
        for about, server in running.values() if given.share else ():
            if about["engine"] != given.engines[0]:
                continue
            last = [
                row for row in rows if row["engine"] == about["engine"] and row.get("loop") == "closed" and "temperature" not in row
            ]
            rate = given.share * last[-1]["requests"] / (given.seconds - given.skip_s) if last else 0.0
            if rate > 0:
                what = {"loop": "open", "rate": round(rate, 3), "share": given.share}
                add({**about, **measure(server, bodies, what, given.seconds, given.skip_s)})
        for about, server in running.values():
            print(f"{about['engine']}: {how(server)}", flush=True)


if __name__ == "__main__":
    main()
