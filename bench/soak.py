"""Whether a server that runs for long keeps its memory: resident bytes of both processes while clients do everything.

    python -m bench.soak --minutes 30 --save bench/results/soak.json

Text, pictures and sounds to every adapter with fewer places than adapters (so that they are swapped), answers held to a
schema, clients that leave, requests that are refused, adapters loaded and unloaded. After the warm-up, memory may not
grow: the median of the last fifth of the samples is compared with that of the first fifth. Linux: it reads /proc.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench import client, parser_of, save
from bench.faults import about, long_body, questions
from bench.served import DEMO, Served
from trimtab.demo.demo import FOLDER

SAMPLE_S = 5.0


def use(server: Served, chance: random.Random, counts: Counter[str]) -> None:
    """Do one thing that clients do."""
    what = chance.choices(("ask", "schema", "leave", "refused", "adapter"), (70, 8, 10, 7, 5))[0]
    if what == "ask":
        ended = client.ask(server.address, chance.choice(questions())).ended
    elif what == "schema":
        ended = client.ask(server.address, long_body(chance.randrange(10, 80))).ended
    elif what == "leave":
        left = iter(range(chance.randrange(1, 10)))
        ended = client.ask(server.address, long_body(), on_piece=lambda _: next(left, None) is not None).ended
    elif what == "refused":
        body = chance.choice(questions())
        wrong = chance.choice(({"model": "nobody"}, {"max_tokens": 5000}, {"top_p": 7}, {"unknown": 1}))
        ended = client.ask(server.address, {**body, **wrong}).ended
    else:
        ended = _load_and_unload(server)
    counts[f"{what}: {ended}"] += 1


def _load_and_unload(server: Served) -> str:
    name = {"lora_name": "passing"}
    client.ask(server.address, {**name, "lora_path": "passing"}, path="/v1/load_lora_adapter")
    ended = client.ask(server.address, client.chat_body("What is shown?", model="passing")).ended
    client.ask(server.address, name, path="/v1/unload_lora_adapter")
    return ended


def soak(minutes: float, warm_minutes: float, clients: int, pause_s: float) -> dict[str, Any]:
    """Return the samples after the warm-up, how much they grew, and what was done meanwhile."""
    counts: Counter[str] = Counter()
    samples: list[tuple[float, int, int]] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(FOLDER / "adapters" / "rslora-dora", Path(root) / "passing")
        with Served([*DEMO, "--resident-adapters", "2", "--adapter-root", root]) as server:
            pid = server.worker_pid()

            def run(number: int) -> None:
                chance = random.Random(number)
                while not over.is_set():
                    use(server, chance, counts)
                    over.wait(pause_s)

            threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(clients)]
            for thread in threads:
                thread.start()
            start = time.monotonic()
            while time.monotonic() - start < 60 * (warm_minutes + minutes):
                over.wait(SAMPLE_S)
                at_s = time.monotonic() - start - 60 * warm_minutes
                if at_s >= 0:
                    samples.append((round(at_s, 1), *server.resident_bytes()))
            over.set()
            for thread in threads:
                thread.join(120)
            numbers = server.wait_quiet(20)["numbers"]
            is_same = server.worker_pid() == pid
    return {
        "minutes": minutes, "warm_minutes": warm_minutes, "clients": clients, "pause_s": pause_s,
        "growth": {"api": growth([one[1] for one in samples]), "worker": growth([one[2] for one in samples])},
        "done": dict(sorted(counts.items())), "requests": sum(counts.values()), "same_worker": is_same,
        "swaps": numbers.get("swaps"), "left": {name: numbers.get(name) for name in ("running", "waiting")},
        "samples": samples[:: max(1, len(samples) // 120)],
    }  # fmt: skip


def growth(values: list[int]) -> dict[str, float]:
    """Return the medians of the first and the last fifth, in MiB, and how much the last is above the first, in percent."""
    part = max(1, len(values) // 5)
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    return {
        "first_mib": round(first / 2**20, 2), "last_mib": round(last / 2**20, 2),
        "percent": round(100 * (last / first - 1), 3), "largest_mib": round(max(values) / 2**20, 2),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="after the warm-up")
    parser.add_argument("--warm-minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=0.2, help="of each client between two requests")
    given = parser.parse_args()
    where = about()
    found = {**soak(given.minutes, given.warm_minutes, given.clients, given.pause_s), "environment": where}
    found["load_after"] = round(os.getloadavg()[0], 2)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}))
    save(given.save, found)


if __name__ == "__main__":
    main()
