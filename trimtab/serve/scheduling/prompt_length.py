"""Texts that cannot fit the context are refused by their first part, so that none of them occupies the tokenizer for seconds.

A token may have many characters, so a text is refused only once the tokens of a part of it are counted. Other texts are tokenized
whole, and its exact count is checked there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trimtab.engine.chat.prompt import CONTEXT_HINT
from trimtab.errors import RequestError
from trimtab.serve.contract.job import Job

# Characters per token of the context: shorter texts may well fit, and are tokenized once; of longer ones parts of these sizes are
# counted first. Ordinary text has 2 to 5 characters per token.
FREE, PARTS = 16, (4, 16, 64)
# The end of a part may be cut within a word, and a longer text is merged differently there: by a few tokens, never by half.
MARGIN = 2


def check_first_tokens(job: Job, tokenizer: Any, context_tokens: int) -> None:
    """Refuse a long text whose first part has more tokens than fit. Errors: RequestError."""
    count = sum(map(len, _texts(job)))
    if count <= FREE * context_tokens:
        return
    text = "".join(_texts(job))
    for part in PARTS:
        size = part * context_tokens
        if size >= count:
            return
        tokens = len(tokenizer(text[:size], add_special_tokens=False)["input_ids"])
        if tokens > MARGIN * context_tokens:
            raise RequestError(
                f"the prompt has more than {MARGIN * context_tokens} tokens, the context has {context_tokens}",
                field="prompt", hint=CONTEXT_HINT,
            )  # fmt: skip


def _texts(job: Job) -> Iterator[str]:
    """Yield the texts of a prompt: of its tools, then of its messages. Token ids have none."""
    if isinstance(job.prompt, dict):
        yield job.prompt["text"]
        return
    if any(isinstance(one, int) for one in job.prompt[:1]):
        return
    if job.tools:
        yield json.dumps(job.tools, ensure_ascii=False)
    yield job.system or ""
    for message in job.prompt:
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")
