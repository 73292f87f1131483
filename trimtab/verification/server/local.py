"""What does trimtab answer to the server's questions with the base, the adapter, and each known fault?"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.api import load, plan_request
from trimtab.engine.kv.sequence import Inputs
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.verification.routes import teacher_forcing
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.routes.trimtab_run import using
from trimtab.verification.server.channels import Question

SAMPLE_TOKENS = 14
# The most memory for logits of texts that are computed together.
LOGITS_BYTES = 64 * 2**20
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


@dataclass(frozen=True)
class Row:
    """One answer of the server as ids: question, its chosen tokens, and id -> logprob at each position (empty without any)."""

    question: Question
    tokens: tuple[int, ...]
    tops: tuple[Mapping[int, float], ...]


class Reference:
    """A loaded model that answers as the base, as its adapter, or as a temporarily attached adapter folder."""

    def __init__(self, model: Any, adapter: str) -> None:
        self.model, self.adapter = model, adapter
        self._prepared: dict[str, Inputs] = {}

    @property
    def spec(self) -> Any:
        return self.model.adapter_spec(self.adapter)

    @property
    def tokenizer(self) -> Any:
        processor = self.model.processor
        return getattr(processor, "tokenizer", processor)

    def inputs(self, question: Question) -> Inputs:
        """Return the model inputs of a question, made once."""
        if question.id not in self._prepared:
            media = {name: value for name in ("image", "audio") if (value := getattr(question, name))}
            prompt = question.prompt if media else list(question.ids)
            self._prepared[question.id] = self.model.prepare(prompt, **media)
        return self._prepared[question.id]

    def question(self, prompt: Prompt) -> Question:
        """Return a prompt as a question to a server. Errors: RequestError."""
        if prompt.token_ids:
            return self.raw_question(prompt.id, prompt.token_ids)
        media = {name: value for name in ("image", "audio") if (value := getattr(prompt, name))}
        prepared = self.model.prepare(prompt.text, **media)
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt.text}]
        if prompt.image:
            parts.insert(0, {"type": "image_url", "image_url": {"url": _data_url(Path(prompt.image))}})
        if prompt.audio:
            sound = {"data": _base64(Path(prompt.audio)), "format": Path(prompt.audio).suffix.lstrip(".").lower()}
            parts.append({"type": "input_audio", "input_audio": sound})
        messages = [{"role": "user", "content": parts if media else prompt.text}]
        question = Question(
            prompt.id, prompt.kind, prepared.token_ids, None if media else self._text(prepared.token_ids), messages,
            prompt.text, prompt.image, prompt.audio,
        )  # fmt: skip
        self._prepared[prompt.id] = prepared
        return question

    def raw_question(self, name: str, ids: Sequence[int]) -> Question:
        """Return a question of bare tokens, which has no chat form."""
        return Question(name, "text", tuple(ids), self._text(ids), None)

    def _text(self, ids: Sequence[int]) -> str | None:
        """Return the text that encodes to exactly these tokens, None if there is none."""
        tokenizer = self.tokenizer
        text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if list(again) == list(ids) else None

    # Answers ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def instead(self, folder: Path) -> Iterator[str]:
        """Use another adapter instead of the attached one while the block runs. Errors: AdapterError."""
        own = self.model.adapter_spec(self.adapter).file.folder
        self.model.unload_adapter(self.adapter)
        try:
            self.model.load_adapter(self.adapter, folder)
            yield self.adapter
        finally:
            if self.adapter in self.model.adapters:
                self.model.unload_adapter(self.adapter)
            self.model.load_adapter(self.adapter, own)

    def greedy(self, question: Question, name: str | None, new_tokens: int) -> tuple[int, ...]:
        """Return the first tokens of the greedy answer."""
        request = GenerateRequest(max_new_tokens=new_tokens)
        return tuple(self.model.answer_inputs(self.inputs(question), request, adapter=name).token_ids)

    def logprobs(self, question: Question, tokens: Sequence[int], name: str | None) -> Tensor:
        """Return logprobs [len(tokens), V] in float32 on the host: of each token, given the earlier ones."""
        inputs = self.inputs(question)
        whole = teacher_forcing.extended(dict(inputs.tensors), list(tokens[:-1]))
        with using(self.model, name):
            logits, _ = teacher_forcing.forward(self.model.hf_model, whole)
        last = logits[0, inputs.prompt_tokens - 1 : inputs.prompt_tokens - 1 + len(tokens)].float().cpu()
        return torch.log_softmax(last, dim=-1)

    def rows(self, rows: Sequence[Row], name: str | None) -> list[Tensor]:
        """Return the logprobs of every row, as `logprobs` does."""
        logprobs: dict[int, Tensor] = {}
        for batch in self._batches(rows):
            inputs = self.inputs(rows[batch[0]].question)
            whole = [
                teacher_forcing.extended(dict(self.inputs(rows[place].question).tensors), list(rows[place].tokens[:-1]))
                for place in batch
            ]
            together = {key: torch.cat([one[key] for one in whole]) for key in whole[0]}
            with using(self.model, name):
                logits, _ = teacher_forcing.forward(self.model.hf_model, together)
            last = logits[:, inputs.prompt_tokens - 1 :].float().cpu()
            logprobs |= dict(zip(batch, torch.log_softmax(last, dim=-1), strict=True))
        return [logprobs[place] for place in range(len(rows))]

    def _batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of rows computed together: of one length, as padding would change roundings as much as a small fault
        changes an answer."""
        most = LOGITS_BYTES // (4 * len(self.tokenizer))  # so few tokens that their logits are small
        alike: dict[Any, list[int]] = {}
        for place, row in enumerate(rows):
            inputs = self.inputs(row.question)
            is_text = row.question.kind == "text"
            alike.setdefault((inputs.prompt_tokens, len(row.tokens), *inputs.tensors) if is_text else place, []).append(place)
        batches = []
        for places in alike.values():
            first = rows[places[0]]
            count = max(1, most // (self.inputs(first.question).prompt_tokens + len(first.tokens)))
            batches += [places[start : start + count] for start in range(0, len(places), count)]
        return batches

    def sample(self, ids: Sequence[int], name: str | None, *, seed: int) -> tuple[int, ...]:
        """Return tokens that the model itself samples: typical text for it."""
        prepared = self.model.prepare(list(ids))
        request = GenerateRequest(max_new_tokens=SAMPLE_TOKENS, temperature=1.0, seed=seed)
        return tuple(self.model.answer_inputs(prepared, request, adapter=name).token_ids)


@contextmanager
def open_reference(
    placed: LoadRequest, quant: str, adapter: str, folder: str | Path, *, others: Mapping[str, Path]
) -> Iterator[Reference]:
    """Load a model in one precision with the adapter, and free its memory at the end.

    placed: the model and its budgets. Bytes are planned for all adapters. Errors: those of planning and loading.
    """
    adapters = {adapter: str(folder), **{name: str(path) for name, path in others.items()}}
    with load(plan_request(replace(placed, quant=quant, adapters=adapters)), decode="eager") as loaded:
        for name in others:
            loaded.unload_adapter(name)
        yield Reference(loaded, adapter)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("ascii")


def _data_url(file: Path) -> str:
    return f"data:{MEDIA_TYPES.get(file.suffix.lower(), 'application/octet-stream')};base64,{_base64(file)}"
