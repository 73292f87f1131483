"""A running job of the engine: its prompt, then its row, and its unsent events."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.engine.batch.generate import Detokenizer
from trimtab.engine.batch.request import Constraint, Prompt, Row
from trimtab.engine.calls.embedding import Embedding
from trimtab.engine.calls.prompt_logprobs import PromptScores
from trimtab.engine.kv.sequence import Inputs
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.worker.answer_parts import Reading


@dataclass(eq=False)
class Answer:
    """One running job: first a prompt, then a row. pending: unsent events. is_begun: its adapter is on the model, under
    the key in `row`.
    """

    job: Job
    prompt: Prompt | None
    row: Row
    detokenizer: Detokenizer | None
    began: float
    first_token: float | None = None
    is_over: bool = False
    is_begun: bool = False
    pending: list[Event] = field(default_factory=list)
    reading: Reading | None = None
    embedding: Embedding | None = None
    scores: PromptScores | None = None
    scored_twice: int = 0  # tokens of a prompt that is computed again after its log-probabilities

    @property
    def is_open(self) -> bool:
        """Whether its complete prompt gets its row without a wait, because the next step samples its first token."""
        return self.prompt is not None and self.prompt.is_open

    @property
    def needs_towers(self) -> bool:
        """Whether the next piece of its prompt is a pass of the towers."""
        return self.prompt is not None and self.prompt.needs_towers

    @property
    def needs_no_row(self) -> bool:
        """Whether its next piece is one of an embedding, or of the log-probabilities of its prompt."""
        return self.embedding is not None or self.scores is not None

    def next_tokens(self, most_tokens: int) -> int:
        """Return the most tokens of its next piece."""
        work = self.embedding or self.scores
        if work is not None:
            return min(most_tokens, work.prompt_tokens - work.done_tokens)
        if self.prompt is None:
            return most_tokens
        return min(most_tokens, self.prompt.inputs.prompt_tokens - self.prompt.done_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is completely computed."""
        return self.prompt is not None and self.prompt.done_tokens >= self.prompt.inputs.prompt_tokens


@dataclass(frozen=True)
class Compiled:
    """The inputs of a job, the reader of its answer (None: no text), and the constraint of the answer."""

    inputs: Inputs
    reading: Reading | None = None
    constraint: Constraint | None = None
