"""What does the scheduler need of an engine?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from trimtab.serve.contract.job import Event, Job


class Engine(Protocol):
    """The engine as the scheduler uses it. An answer is the engine's object for one job."""

    rows: int

    @property
    def beside_tokens(self) -> int:
        """How many tokens prompts may have together that pass the first one of rows or the first one of those that need none
        (in_progress.py)."""

    @property
    def interleaves(self) -> bool:
        """Whether several prompts that will have rows can be in progress at once."""

    def passing_tokens(self, answer: Any) -> int:
        """Return the tokens of a prompt that may begin while another is in progress; 0 for any other prompt."""

    def kept_tokens(self, answer: Any) -> int:
        """Return the tokens whose keys and values are kept for an answer whose log-probabilities are complete."""

    def release(self, answer: Any) -> None:
        """Free these keys and values: the prompt is computed again."""

    def prepare(self, job: Job) -> Future[Any] | None:
        """Begin to make a job's inputs on another thread; None if there is nothing to make."""

    def begin(self, job: Job, inputs: Any = None) -> Any:
        """Check a job and return its answer, nothing computed. inputs: from `prepare`. Errors: any TrimtabError refuses the job."""

    @property
    def chunk_sizes(self) -> Sequence[int]:
        """Chunk sizes in tokens; empty for any size."""

    def prefill(self, answer: Any, most_tokens: int) -> tuple[int, bool]:
        """Compute the next chunk of the prompt, of at most `most_tokens` if its inputs can be split. Return the size of
        the chunk, `budget.TOWERS` for a pass of the towers, and True when the prompt is complete; 0 and False where it
        waits for an embedding in the memory of chunks. Nothing waits for the device, unless log-probabilities are read."""

    def choose(self, answer: Any) -> None:
        """Prepare an answer's prompt, which is computed soon: its adapter stays on the model. Errors: TrimtabError."""

    def goes_alone(self, answer: Any) -> bool:
        """Whether a prompt is too long to be computed in one pass with others, or cannot be for another reason."""

    def prefill_together(self, answers: Sequence[Any], most_tokens: int) -> tuple[int, list[Any]]:
        """Compute several of these prompts at once, the first among them, if that is faster than one after the other.
        Return the size of the pass and the complete prompts; 0 and none if the first one is computed alone."""

    def arrive(self, answer: Any) -> None:
        """Give a computed prompt its row and its first token; called in the order of computing. For one that `is_open`,
        the next step samples the first token: it is called before that step, and nothing waits."""

    def step(self, behind: Callable[[], bool] | None = None) -> None:
        """Decode one step of every row. behind: called once the step is queued, before anything waits for it; returns
        whether it queued more work. Errors: TrimtabError, such as memory that ran out; the step can be called again."""

    def piece(self, answer: Any, most_tokens: int) -> tuple[int, bool]:
        """Compute the next piece of an answer that `needs_no_row`, of at most `most_tokens` if it can be split. Return
        the size of the piece in tokens, and True when it was the last. Errors: TrimtabError."""

    def spent(self, answer: Any) -> Mapping[str, int]:
        """Return the tokens that were computed for an answer so far: prompt_tokens, completion_tokens."""

    def chunk_times(self) -> Iterable[tuple[int, float]]:
        """Return the size and the seconds of every chunk that was timed since the last call."""

    def news(self, answer: Any) -> Iterable[Event]:
        """Return the new events of this answer since the last call; the last one is "done" or "error"."""

    def drop(self, answer: Any) -> None:
        """Forget an answer and free its row."""

    def is_prepared(self, adapter: str | None) -> bool:
        """Whether an adapter, or all of a mix, can be used without much computing. If not, it is being prepared between turns."""

    def is_ready(self, adapter: str | None) -> bool:
        """Whether a prepared adapter can be used in the batch now (it is resident, or can be made resident)."""

    def has_room(self, answer: Any) -> bool:
        """Whether keys and values of an answer's prompt and longest answer fit in addition to those reserved for
        others. Of an embedding in captured chunks: whether no prompt has their memory."""
