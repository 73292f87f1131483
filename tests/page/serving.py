"""A server of the demo model on a free port, in a process of its own: what the page's tests and pictures look at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import waiting

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "trimtab" / "demo"
KEPT, OTHERS = "style", ("rslora-dora", "specialist")
READY_S = 300  # a busy machine starts Python, torch and the model in minutes
ADMIN = "-admin"  # what the admin key has behind the client's


def main(port: int, keys: tuple[str, ...]) -> None:
    """Serve the demo model: one adapter kept, two known, room for two, blocks in three tiers."""
    import uvicorn

    from trimtab.request import LoadRequest
    from trimtab.serve.contract.settings import Settings
    from trimtab.serve.http.app import make_app
    from trimtab.serve.http.page import page_routes
    from trimtab.serve.observe.metrics import Metrics
    from trimtab.serve.pool import Pool
    from trimtab.serve.worker.registry import ServedModel

    request = LoadRequest(
        model=str(DEMO / "base"), context_tokens=512, audio_s=1.0, device="cpu",
        gpu_memory_bytes=116 * 2**20, host_memory_bytes=2 * 2**30,
        place={"model.vision_tower*": "stream", "model.audio_tower*": "disk"},
    )  # fmt: skip
    adapters = {name: str(DEMO / "adapters" / name) for name in (KEPT, *OTHERS)}
    served = ServedModel(name="gemma-demo", request=request, adapters=adapters, kept=(KEPT,), rows=4, resident_limit=2)
    admin = tuple(key + ADMIN for key in keys)
    settings = Settings(port=port, api_keys=keys, admin_keys=admin, adapter_root=DEMO / "adapters")
    pool = Pool([served], settings)
    app = make_app(pool, settings, Metrics(), extra=page_routes(settings), folders=pool.folders)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2)


@contextmanager
def running(key: str = "") -> Iterator[str]:
    """Yield the address of a server that is ready, and stop it at the end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, str(Path(__file__)), str(port), key], env=environment, cwd=ROOT)
    try:
        _wait(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    waiting.until(is_ready, READY_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), (sys.argv[2],) if len(sys.argv) > 2 and sys.argv[2] else ())
