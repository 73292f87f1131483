"""How long one request holds up a running answer on a CPU: the longest time between two pieces of a stream beside it.

    python -m bench.holds --save bench/results/holds.json [--runs 3] [--only "29 s of audio"]

The demo model in a server of its own. A stream runs; one second later the other request is sent, whose prompt, files or schema
are new in each run. The longest gap is looked for from then until half a second after its end. Without another request it is
the noise of the machine, whose load is recorded: a busy machine makes every figure longer.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from bench import parser_of, save, saved
from bench.client import ask, chat_body
from bench.load_bodies import SOUND_HZ, png, wav
from bench.served import Served
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process.packages import stack_versions

WAIT_S, BEFORE_S, AFTER_S = 180, 1.0, 0.5
CONTEXT = 4096
SERVED = [str(DEMO / "base"), "--name", "demo", "--device", "cpu", "--rows", "4", "--context", str(CONTEXT), "--adapter-root",
          str(DEMO / "adapters")]  # fmt: skip
ENDS = (1, 16)  # tokens that end an answer of the demo model: the next one would wait for the other request's prompt
WORDS = ("red", "square", "left", "of", "a", "small", "circle", "and", "two", "green", "lines", "above", "it")


def post(address: str, path: str, body: dict[str, Any]) -> None:
    """Send JSON and read the whole answer. Errors: AssertionError for one that is not complete."""
    asked = ask(address, body, path=path, timeout_s=WAIT_S)
    assert asked.ended == "complete", asked


def chat(address: str, text: str, model: str = "demo", **more: Any) -> None:
    post(address, "/v1/chat/completions", chat_body(text, model=model, max_tokens=2, **more))


def text_of(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


def send_image(address: str, seed: int) -> None:
    chat(address, "What is it?", image=png(random.Random(seed)))


def send_audio(address: str, seed: int) -> None:
    chat(address, "?", audio=wav(random.Random(seed).randbytes(2 * 29 * SOUND_HZ)))


def send_long_prompt(address: str, seed: int) -> None:
    chat(address, text_of(seed, 1200))


def send_schema(address: str, seed: int) -> None:
    fields = {f"field_{seed}_{number}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for number in range(40)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "fields", "schema": schema, "strict": True}}
    chat(address, "Fill in the fields.", response_format=wanted)


def send_adapter(address: str, seed: int) -> None:
    """Load an adapter, and name it in a request."""
    name = f"specialist-{seed}"
    post(address, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "specialist"})
    chat(address, "What helps?", name)
    post(address, "/v1/unload_lora_adapter", {"lora_name": name})


CASES: dict[str, Callable[[str, int], None]] = {
    "nothing": lambda address, seed: time.sleep(2.0),
    "image of 640 x 480": send_image,
    "29 s of audio": send_audio,
    "prompt of about 1,200 words": send_long_prompt,
    "schema with 40 patterns": send_schema,
    "adapter that is loaded and used": send_adapter,
}


def run(address: str, send: Callable[[str, int], None], seed: int) -> dict[str, float]:
    """Return the longest and the median gap of a stream in seconds, and how long the request took beside it."""
    times: list[float] = []
    is_over = threading.Event()

    def seen(_: str) -> bool:
        times.append(time.perf_counter())
        return not is_over.is_set()

    def stream() -> None:
        number = 0
        while not is_over.is_set():  # the context ends it, or the most tokens
            body = chat_body("Go on.", model="demo", max_tokens=2000, seed=1000 * seed + number)
            body |= {"temperature": 2, "logit_bias": dict.fromkeys(map(str, ENDS), -100)}
            ended = ask(address, body, timeout_s=WAIT_S, on_piece=seen)
            assert ended.ended in ("complete", "left"), ended
            number += 1

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        until = time.perf_counter() + WAIT_S
        while len(times) < 10 and thread.is_alive() and time.perf_counter() < until:
            time.sleep(0.01)
        time.sleep(BEFORE_S)
        begun = time.perf_counter()
        send(address, seed)
        took_s = time.perf_counter() - begun
        time.sleep(AFTER_S)
    finally:
        is_over.set()
        thread.join()
    gaps = [
        later - earlier for earlier, later in zip(times, times[1:], strict=False)
        if later > begun and earlier < begun + took_s + AFTER_S
    ]  # fmt: skip
    return {"longest_s": round(max(gaps), 3), "median_s": round(statistics.median(gaps), 4), "request_s": round(took_s, 2)}


def measure(runs: int, names: Collection[str]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    with Served(SERVED) as server:
        for place, name in enumerate(CASES):
            if name not in names:
                continue
            made, loads = [], []
            for number in range(runs):
                loads.append(os.getloadavg()[0])
                made.append(run(server.address, CASES[name], seed=100 * place + number + 1))
            cases[name] = {
                "longest_s": statistics.median(one["longest_s"] for one in made), "runs": made,
                "load_average": [round(min(loads), 1), round(max(loads), 1)],
            }  # fmt: skip
            print(name, cases[name], flush=True)
    return {"cases": cases, "cores": os.cpu_count(), "versions": stack_versions()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=CASES, action="append", help="this case alone; the others of the file stay")
    options = parser.parse_args()
    result = measure(options.runs, options.only or CASES)
    if options.only:
        result["cases"] = {**saved(options.save).get("cases", {}), **result["cases"]}
    save(options.save, result)


if __name__ == "__main__":
    main()
