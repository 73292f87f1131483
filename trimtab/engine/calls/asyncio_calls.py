"""Awaiting an answer: a separate thread generates it and passes each delta to the asyncio event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from trimtab.engine.batch.generate import Answer, Timed

if TYPE_CHECKING:
    from trimtab.engine.calls.asked_model import AskedModel

_END = object()


async def pieces(
    model: AskedModel, prompt: object, options: Mapping[str, object], answers: list[Answer]
) -> AsyncIterator[str]:
    """Yield an answer in pieces and put the whole of it into `answers`; leaving early ends it within one step.

    Errors: as `LoadedModel.answer`.
    """
    loop, queue, stop = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

    def emit(item: object) -> None:
        with suppress(RuntimeError):  # a loop that was closed waits for nothing
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            inputs, request, adapter = model.question(prompt, options)
            timed = Timed(model, inputs, request)
            with model._answering(adapter), closing(iter(timed)) as chunks:  # type: ignore[type-var]
                for piece in () if stop.is_set() else chunks:
                    emit(piece.text)
                    if stop.is_set():
                        break
            answers.append(timed.answer)
        except BaseException as exc:
            emit(exc)
        finally:
            emit(_END)

    threading.Thread(target=work, name="trimtab-answer", daemon=True).start()
    try:
        while (item := await queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            if item:
                yield item
    finally:
        stop.set()
