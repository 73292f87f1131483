"""The order in which prompts become model inputs, on a separate thread, so that an image delays no token of others.

Images and audio are decoded, images resized and audio turned into features by a few threads (media_pool.py). Everything else is
done by one thread, because a tokenizer is changed while it encodes. Short texts come first: a text waits for one prompt with media
at most, however many of those there are.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import drop_tracebacks, write_traceback
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.scheduler import MistakeError

# A text of more characters waits with the media.
SHORT_CHARACTERS = 32_768


class Preparing:
    """The thread. prepare: job -> its inputs; its exception becomes the future's. media: decodes images and audio first (None:
    prepare does)."""

    def __init__(self, prepare: Callable[[Job], Any], media: MediaPool | None = None) -> None:
        self._prepare, self._media = prepare, media
        self._waiting: queue.PriorityQueue[tuple[bool, int, Future[Any], Job, Callable[[Any], None] | None]]
        self._waiting = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def start(self, first: Callable[[], None] | None = None) -> None:
        """Start the thread. first: called before any prompt; if that fails, prompts are prepared nevertheless."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, args=(first,), name="trimtab-prepare", daemon=True)
            thread.start()
            self._thread = thread

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be; cancelling them is enough to forget the job."""
        future: Future[Any] = Future()
        try:
            self.start()
            if self._media is not None and has_media(job.prompt):
                self._media.submit(job, future, lambda decoded, pass_on: self._put(decoded, future, pass_on))
            else:
                self._put(job, future)
        except RuntimeError as exc:  # the system starts no thread: this prompt's problem alone
            future.set_exception(MistakeError(write_traceback(exc, "preparing a prompt")))
        return future

    def _put(self, job: Job, future: Future[Any], pass_on: Callable[[Any], None] | None = None) -> None:
        self._waiting.put((not is_short(job.prompt), next(self._numbers), future, job, pass_on))

    def _run(self, first: Callable[[], None] | None) -> None:
        try:
            if first is not None:
                first()
        except BaseException as exc:
            # A panic of a library in Rust too: without this thread every later prompt would wait indefinitely.
            write_traceback(exc, "before the first prompt")
        while True:
            self._prepare_next()

    def _prepare_next(self) -> None:
        _, _, future, job, pass_on = self._waiting.get()
        # A job with media has been running since it was decoded.
        if pass_on is None and not future.set_running_or_notify_cancel():
            return
        inputs: Any = None
        problem: BaseException | None = None
        try:
            inputs = self._prepare(job)
        except BaseException as exc:
            drop_tracebacks(exc)
            problem = exc
        del job  # its media, before their memory counts as free
        if pass_on is not None:
            try:
                pass_on(inputs)
            except BaseException as exc:  # the thread goes on with the next prompt
                problem = MistakeError(write_traceback(exc, "counting the memory of images and audio"))
        if problem is None:
            future.set_result(inputs)
        else:
            future.set_exception(problem)


def has_media(prompt: Any) -> bool:
    """Whether a prompt is messages with images or audio."""
    return isinstance(prompt, list) and any(
        part["type"] != "text" for message in prompt if isinstance(message, dict) for part in _parts(message)
    )


def is_short(prompt: Any) -> bool:
    """Whether a prompt has no media and little text."""
    if isinstance(prompt, dict):
        return len(prompt["text"]) <= SHORT_CHARACTERS
    if isinstance(prompt, str):
        return len(prompt) <= SHORT_CHARACTERS
    if has_media(prompt):
        return False
    count = sum(len(part["text"]) for message in prompt if isinstance(message, dict) for part in _parts(message))
    return count <= SHORT_CHARACTERS


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []
