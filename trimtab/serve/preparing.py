"""In which order prompts become model inputs, on a thread of their own: decoding an image never delays a token of others.

One thread, because a tokenizer is changed while it encodes. Short texts come first: a text waits for one prompt with media at
most, however many of those there are.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trimtab.serve.job import Job

# A text of more characters waits with the media.
SHORT_CHARACTERS = 32_768


class Preparing:
    """The thread. prepare: job -> its inputs; what it raises is what the future holds."""

    def __init__(self, prepare: Callable[[Job], Any]) -> None:
        self._prepare = prepare
        self._waiting: queue.PriorityQueue[tuple[bool, int, Future[Any], Job]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be; cancelling them is enough to forget the job."""
        future: Future[Any] = Future()
        self._waiting.put((not is_short(job.prompt), next(self._numbers), future, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trimtab-prepare", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            _, _, future, job = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._prepare(job))
            except BaseException as exc:
                future.set_exception(exc)


def is_short(prompt: Any) -> bool:
    """Whether a prompt has no media and little text."""
    if isinstance(prompt, dict):
        return len(prompt["text"]) <= SHORT_CHARACTERS
    if isinstance(prompt, str):
        return len(prompt) <= SHORT_CHARACTERS
    count = 0
    for message in prompt:
        content = message["content"] if isinstance(message, dict) else ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        if any(part["type"] != "text" for part in parts):
            return False
        count += sum(len(part["text"]) for part in parts)
    return count <= SHORT_CHARACTERS
