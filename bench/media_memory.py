"""Measures the memory that images and audio take in a server's worker, against what its plan counts for them.

python -m bench.media_memory --save bench/results/media_memory.json

The demo model on a CPU, with the default limits. The largest allowed requests are prepared alone and all at once: the rise of the
process's resident memory is compared with the plan's `media`. Linux only: the peak is that of /proc/self/status.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

import trimtab
from bench import parser_of, save
from trimtab.api import plan_request
from trimtab.demo.demo import FOLDER
from trimtab.planning.memory.media import MOST_RATE, ServedMedia
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.settings import Limits
from trimtab.serve.scheduling.media_pool import return_freed_pages
from trimtab.serve.worker.engine import LoadedEngine

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WAIT_S = 300.0


def status_bytes(name: str) -> int:
    """Return a figure of this process's memory, such as VmRSS."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def image(width: int, height: int, mode: str, kind: str, **options: Any) -> dict[str, Any]:
    """Return an image of one color as the part of a message."""
    out = io.BytesIO()
    Image.new(mode, (width, height), 90 if mode == "L" else tuple(range(10, 10 + len(mode)))).save(out, kind, **options)
    return {"type": "image", "image": out.getvalue()}


def sound(rate: int, seconds: float) -> dict[str, Any]:
    """Return noise as the part of a message."""
    samples, out = np.random.default_rng(0).standard_normal(int(rate * seconds)).astype(np.float32) / 8, io.BytesIO()
    soundfile.write(out, samples, rate, format="WAV", subtype="PCM_16")
    return {"type": "audio", "audio": out.getvalue()}


def requests() -> dict[str, list[dict[str, Any]]]:
    """Return the largest requests of each kind, by name."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    return {
        "one WebP with transparency, 32 million pixels": [image(8000, 4000, "RGBA", "WEBP", lossless=True, method=0, quality=0)],
        "one rotated progressive JPEG in four colors, 32 million pixels": [
            image(8000, 4000, "CMYK", "JPEG", progressive=True, exif=rotated)
        ],
        "one gray PNG, 32 million pixels": [image(8000, 4000, "L", "PNG")],
        "16 PNG, 32 million pixels together": [image(1920, 1040, "RGB", "PNG")] * 16,
        "29 s of audio at 768 kHz": [sound(MOST_RATE, 29)],
    }


def prepared(engine: LoadedEngine, several: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rise of the resident memory while requests are prepared at once, and the seconds that it took."""
    time.sleep(1.5)  # the pool's own return of memory
    return_freed_pages()
    before = status_bytes("VmRSS")
    CLEAR.write_text("5")
    begun = time.monotonic()
    futures: list[Future[Any]] = []
    for number, parts in enumerate(several):
        content = [*parts, {"type": "text", "text": "?"}]
        job = Job(str(number), [{"role": "user", "content": content}], GenerateRequest(max_new_tokens=1))
        futures.append(engine.prepare(job))  # type: ignore[arg-type]
    while futures:
        futures.pop(0).result(WAIT_S)  # its inputs are dropped, as after a prompt
    return {"rise_bytes": status_bytes("VmHWM") - before, "seconds": time.monotonic() - begun}


def measure() -> dict[str, Any]:
    limits = Limits()
    media = ServedMedia(
        kinds=("image", "audio"), request_pixels=limits.request_pixels, request_audio_s=limits.request_audio_s,
        all_body_bytes=limits.all_body_bytes,
    )  # fmt: skip
    request = LoadRequest(model=str(FOLDER / "base"), device="cpu", quant="none", context_tokens=8192, images=16)
    plan = plan_request(request, later={}, media=media)
    with trimtab.load(plan) as model:
        engine = LoadedEngine(model, rows=1)
        engine.capture()
        engine.inputs.has_learned.wait(WAIT_S)
        kinds = requests()
        prepared(engine, [kinds["29 s of audio at 768 kHz"]])  # libraries that the first request loads
        run: Callable[[list[list[dict[str, Any]]]], dict[str, Any]] = partial(prepared, engine)
        rises = {name: run([parts]) for name, parts in kinds.items()}
        rises["all of these at once"] = run(list(kinds.values()))
    return {
        "planned_bytes": plan.host["media"], "reason": plan.media_reason, "load": os.getloadavg()[0], "requests": rises,
        "most_share": max(one["rise_bytes"] for one in rises.values()) / plan.host["media"],
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    found = measure()
    print(json.dumps(found, indent=1))
    save(options.save, found)


if __name__ == "__main__":
    main()
