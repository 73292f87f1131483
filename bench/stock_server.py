"""The smallest honest server of the stock stack: `model.generate` under a lock, `set_adapter` for each request, one at a time.

    python -m bench.stock_server FOLDER --adapter NAME=PATH ... --port 0 [--device cuda] [--quant nf4-dq]

What a careful user writes in an afternoon with transformers, peft and starlette: the chat template with pictures and sounds,
a streamer, answers as server-sent events in OpenAI's shape, and a request whose client has left is not begun, or ended at
its next token. `bench.load` compares with it. Everything is on one device: stock cannot load adapters on a split model.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trimtab.engine.loader.processor import load_processor
from trimtab.serve.run import address_of, listen


class Stock:
    """One model with its adapters. Its lock is the queue."""

    def __init__(self, folder: Path, adapters: dict[str, Path], *, device: str, quant: str, dtype: str) -> None:
        import torch

        from trimtab.stock.load import load_adapter, load_base, quantization

        self.processor = load_processor(folder)  # AutoProcessor wants torchvision, for videos
        self.model: Any = load_base(
            folder, repack=True, dtype=getattr(torch, dtype), device_map={"": device},
            quantization_config=quantization(quant, dtype=dtype),
        )  # fmt: skip
        for place, (name, path) in enumerate(adapters.items()):
            if place == 0:
                self.model = load_adapter(self.model, path, adapter_name=name)
            else:
                self.model.load_adapter(path, adapter_name=name)
        self.model.eval()
        self.adapters, self.lock = set(adapters), threading.Lock()

    def answer(self, body: dict[str, Any], put: Any, left: threading.Event) -> None:
        """Answer one request; `put` gets its pieces, its counts, then None."""
        import torch
        from transformers import StoppingCriteria, TextIteratorStreamer

        class Left(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                return torch.full((input_ids.shape[0],), left.is_set(), device=input_ids.device, dtype=torch.bool)

        try:
            inputs = self.processor.apply_chat_template(
                list(_messages(body)), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            with self.lock:
                if left.is_set():
                    return
                tokenizer = getattr(self.processor, "tokenizer", self.processor)
                has_media = tokenizer is not self.processor
                inputs = inputs.to(self.model.device, **({"dtype": self.model.dtype} if has_media else {}))
                streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                done: dict[str, Any] = {}
                worker = threading.Thread(target=self._generate, args=(body, inputs, streamer, Left(), done), daemon=True)
                worker.start()
                for piece in streamer:
                    put(piece)
                worker.join()
            if "error" in done:
                raise done["error"]
            prompt = inputs["input_ids"].shape[1]
            put({"prompt_tokens": prompt, "completion_tokens": done["tokens"] - prompt})
        except Exception as exc:
            put(exc)
        finally:
            put(None)

    def _generate(self, body: dict[str, Any], inputs: Any, streamer: Any, left: Any, done: dict[str, Any]) -> None:
        import torch
        from transformers import StoppingCriteriaList

        name = body["model"] if body["model"] in self.adapters else None
        if name is not None:
            self.model.set_adapter(name)
        base = contextlib.nullcontext() if name is not None or not self.adapters else self.model.disable_adapter()
        try:
            with torch.inference_mode(), base:
                found = self.model.generate(
                    **inputs, streamer=streamer, max_new_tokens=body["max_tokens"], do_sample=False,
                    stopping_criteria=StoppingCriteriaList([left]),
                )  # fmt: skip
            done["tokens"] = found.shape[1]
        except Exception as exc:
            done["error"] = exc
            streamer.end()


def _messages(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from PIL import Image

    for message in body["messages"]:
        parts = []
        for part in message["content"]:
            if part["type"] == "image_url":
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                parts.append({"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")})
            elif part["type"] == "input_audio":
                parts.append({"type": "audio", "audio": _sound(base64.b64decode(part["input_audio"]["data"]))})
            else:
                parts.append(part)
        yield {"role": message["role"], "content": parts}


def _sound(data: bytes) -> Any:
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 16000, "the demo's sounds are at 16 kHz"
    return samples


def app_of(stock: Stock) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        loop, told, left = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()
        args = (body, lambda item: loop.call_soon_threadsafe(told.put_nowait, item), left)
        threading.Thread(target=stock.answer, args=args, daemon=True).start()

        async def pieces() -> AsyncIterator[str]:
            try:
                while (item := await told.get()) is not None:
                    yield f"data: {json.dumps(_chunk(item))}\n\n"
                    if isinstance(item, Exception):
                        return
                yield "data: [DONE]\n\n"
            finally:
                left.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def ready(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def status(request: Request) -> Response:
        waiting = int(stock.lock.locked())
        return JSONResponse({"models": [{"state": "ready", "in_flight": waiting, "waiting": 0, "numbers": {}}]})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/ready", ready), Route("/api/status", status)]
    return Starlette(routes=routes)


def _chunk(item: Any) -> dict[str, Any]:
    if isinstance(item, Exception):
        return {"error": {"class": type(item).__name__, "message": str(item)[:500]}}
    if isinstance(item, dict):
        return {"choices": [], "usage": item}
    return {"choices": [{"index": 0, "delta": {"content": item}, "finish_reason": None}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quant", default="none", choices=["none", "nf4", "nf4-dq"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    adapters = {name: Path(path) for name, _, path in (text.partition("=") for text in given.adapter)}
    stock = Stock(given.folder, adapters, device=given.device, quant=given.quant, dtype=given.dtype)
    listener = listen("127.0.0.1", given.port)
    print(address_of(listener), flush=True)
    config = uvicorn.Config(app_of(stock), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
