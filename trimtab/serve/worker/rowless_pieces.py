"""The next piece of an embedding, or of a prompt's log-probabilities, and its events: answers that need no row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trimtab.engine.batch.batch import Batch
from trimtab.engine.calls.embedding import Embedding
from trimtab.engine.calls.prompt_logprobs import PromptScores
from trimtab.serve.contract.job import Event, finite_logprob
from trimtab.serve.worker.answer import Answer

Decode = Callable[[list[int]], Any]


def run(answer: Answer, most_tokens: int, batch: Batch, decode: Decode) -> tuple[int, bool]:
    """Compute the next piece and wait for it. Return its tokens, and True when it was the last.

    decode: token ids -> text. Errors: those of the model.
    """
    work = answer.embedding or answer.scores
    assert work is not None
    before = work.done_tokens
    if answer.embedding is not None:
        is_over = _embedded(answer, answer.embedding, _most_embedded(batch, most_tokens))
    else:
        assert answer.scores is not None
        is_over = _scored(answer, answer.scores, batch, decode)
    if batch.model.device.type == "cuda":
        torch.cuda.current_stream(batch.model.device).synchronize()
    return work.done_tokens - before, is_over


def _most_embedded(batch: Batch, most_tokens: int) -> int:
    """Return the most tokens of a piece of an embedding. On a GPU its kernels are launched separately, which takes as
    long for few tokens as for many. Batch-invariant answers do not depend on the load, and neither do their embeddings.
    """
    most = int(batch.model.prefill_tokens)
    return most if batch.model.device.type == "cuda" or batch.is_invariant else min(most_tokens, most)


def _embedded(answer: Answer, embedding: Embedding, most_tokens: int) -> bool:
    if not embedding.step(most_tokens):
        return False
    usage = {"prompt_tokens": embedding.prompt_tokens, "completion_tokens": 0}
    result = {"embedding": embedding.vector}
    answer.end_embedding(Event(answer.job.id, "done", finish="stop", usage=usage, result=result))
    return True


def _scored(answer: Answer, scores: PromptScores, batch: Batch, decode: Decode) -> bool:
    """Compute a piece and emit it. The answer's prompt follows, unless transformers' passes compute it too: then it is
    complete.
    """
    start, is_over = scores.done_tokens, scores.step()
    answer.pending.append(scored_event(answer.job.id, start, scores.take(), decode))
    if not is_over:
        return False
    answer.end_scores(is_again=bool(batch.prompts.sizes) or batch.is_invariant or batch.prefixes.cache is not None)
    return True


def scored_event(job_id: str, start: int, scores: Sequence[Mapping[int, tuple[float, int]]], decode: Decode) -> Event:
    """Return a piece of a prompt's log-probabilities in vLLM's form: values of a JSON list, inserted unchanged into the
    response. start: the first token of the piece; the first token of a prompt has no probability, which is null.
    """
    shown: list[Any] = [None] if start == 0 else []
    for entry in scores:
        shown.append(
            {
                str(token): {
                    "logprob": finite_logprob(logprob), "rank": rank, "decoded_token": str(decode([token])),
                }
                for token, (logprob, rank) in entry.items()
            }
        )  # fmt: skip
    data = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))[1:-1].encode()
    return Event(job_id, "scores", result={"start": start}, data=data)


def spent(answer: Answer) -> dict[str, int]:
    """Return the tokens that were computed for an answer; a prompt copied from another choice has none."""
    row, work = answer.row, answer.embedding or answer.scores
    done = row.prompt_tokens if work is None else work.done_tokens
    if work is None and answer.prompt is not None and not answer.is_complete:
        done = answer.prompt.done_tokens
    return {"prompt_tokens": done + answer.scored_twice - row.shared_tokens, "completion_tokens": len(row.answer_ids)}
