"""The order in which prompts become model inputs, on a separate thread, so that an image delays no token of others.

Images and audio are decoded, images resized and audio turned into features by a few threads (media_pool.py). Everything else is
done by one thread, because a tokenizer is changed while it encodes. Clients take turns, and short texts come first: a text waits
for one prompt with media at most, however many of those there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import drop_tracebacks, write_traceback
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.queue import FairPool, Turn, Work, settle
from trimtab.serve.scheduling.scheduler import MistakeError

# A text of more characters waits with the media.
SHORT_CHARACTERS = 32_768


@dataclass(eq=False)
class _Prompt(Work):
    """prompt: the job until its inputs are made. pass_on: called with the inputs of decoded media."""

    prompt: list[Job]
    is_short: bool
    pass_on: Callable[[Any], None] | None = None


class Preparing(FairPool[_Prompt]):
    """The thread. prepare: job -> its inputs; its exception becomes the future's. media: decodes images and audio first (None:
    prepare does)."""

    def __init__(self, prepare: Callable[[Job], Any], media: MediaPool | None = None) -> None:
        super().__init__("trimtab-prepare", 1)
        self._prepare, self._media = prepare, media
        self._first: Callable[[], None] | None = None

    def start(self, first: Callable[[], None]) -> None:
        """Start the thread. first: called before any prompt; if that fails, prompts are prepared nevertheless."""
        self._first = first
        with self.changed:
            self._start_thread()

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be; cancelling them is enough to forget the job."""
        future: Future[Any] = Future()
        try:
            if self._media is not None and has_media(job.prompt):
                self._media.submit(job, future, lambda decoded, pass_on: self.put_prompt(decoded, future, pass_on))
            else:
                self.put_prompt(job, future)
        except RuntimeError as exc:  # the system starts no thread: this prompt's problem alone
            future.set_exception(MistakeError(write_traceback(exc, "preparing a prompt")))
        return future

    def put_prompt(self, job: Job, future: Future[Any], pass_on: Callable[[Any], None] | None = None) -> None:
        """Let a prompt wait. pass_on: of one whose media were decoded; it has been running since."""
        self.put(_Prompt(Turn(job.sender), future, [job], is_short(job.prompt), pass_on))

    def choose(self) -> _Prompt | None:
        return min(self.turns.in_turn(), key=lambda one: not one.is_short, default=None)

    def _run(self) -> None:
        try:
            if self._first is not None:
                self._first()
        except BaseException as exc:
            # A panic of a library in Rust too: without this thread every later prompt would wait indefinitely.
            write_traceback(exc, "before the first prompt")
        super()._run()

    def do(self, work: _Prompt) -> None:
        # A job with media has been running since it was decoded.
        if work.pass_on is not None or work.future.set_running_or_notify_cancel():
            settle(work.future, lambda: self._inputs(work), is_running=True)

    def _inputs(self, work: _Prompt) -> Any:
        inputs = None
        try:
            inputs = self._prepare(work.prompt.pop())
        except BaseException as exc:
            drop_tracebacks(exc)  # its frames have the media, whose memory is about to count as free
            raise
        finally:
            if work.pass_on is not None:
                self._pass_on(work.pass_on, inputs)
        return inputs

    def _pass_on(self, pass_on: Callable[[Any], None], inputs: Any) -> None:
        try:
            pass_on(inputs)
        except BaseException as exc:
            raise MistakeError(write_traceback(exc, "counting the memory of images and audio")) from None


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
