"""A server with planted faults, inside this process: OpenAI's shapes over loaded models, for what judges servers.

Each of its models is a loaded model with one of its adapters (None: the base). `transport` stands where the network is.
"""

from __future__ import annotations

import base64
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from trimtab.request import GenerateRequest
from trimtab.verification.routes import teacher_forcing


@dataclass
class Planted:
    """model: a LoadedModel. names: model name -> name of an adapter attached to it, None for its base.

    kinds: endpoints that exist. top: the most logprobs that it gives, 0: it refuses them. takes_ids: whether a prompt may be
    token ids. template: replaces the chat template's prompt by another one. jitter: random change of every logit, as other
    kernels make it.
    """

    model: Any
    names: Mapping[str, str | None]
    kinds: tuple[str, ...] = ("completions", "chat/completions")
    top: int = 20
    takes_ids: bool = True
    system: str | None = None
    jitter: float = 0.0
    requests: int = 0
    # Computed logits by question, which several servers of one model may share.
    share: dict[Any, Any] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)

    def transport(self) -> httpx2.MockTransport:
        self._folder = tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True)
        return httpx2.MockTransport(self._answer)

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests += 1
        path = request.url.path.partition("/v1/")[2]
        if path == "models":
            return httpx2.Response(200, json={"object": "list", "data": [{"id": name} for name in self.names]})
        body = json.loads(await request.aread())
        if path not in self.kinds:
            return _refused(404, "Not Found")
        if body["model"] not in self.names:
            return _refused(404, f"no model {body['model']}")
        wanted = body.get("top_logprobs", 0) if path.startswith("chat") else body.get("logprobs")
        if wanted and wanted > self.top:
            return _refused(400, f"at most {self.top} logprobs")
        if path == "completions" and isinstance(body["prompt"], list) and not self.takes_ids:
            return _refused(400, "prompt must be a string")
        return httpx2.Response(200, json=self._made(path, body, self.names[body["model"]], wanted))

    def _made(self, path: str, body: Mapping[str, Any], adapter: str | None, wanted: int | None) -> dict[str, Any]:
        key = (adapter, json.dumps([body.get("prompt"), body.get("messages"), body["max_tokens"]]))
        if key not in self.share:
            self.share[key] = self._computed(self._inputs(body), adapter, body["max_tokens"])
        tokens, last, prompt_tokens = self.share[key]
        tokenizer = getattr(self.model.processor, "tokenizer", self.model.processor)
        if self.jitter:
            seed = random.Random(repr((key, self.jitter))).randrange(2**31)
            last = last + self.jitter * torch.randn(last.shape, generator=torch.Generator().manual_seed(seed))
        logprobs = torch.log_softmax(last, dim=-1)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        usage = {"prompt_tokens": prompt_tokens}
        found: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": "length"}], "usage": usage}
        choice = found["choices"][0]
        chosen = [(self._word(t), float(row[t])) for t, row in zip(tokens, logprobs, strict=True)]
        tops = []
        for row in logprobs:
            values, ids = torch.topk(row, max(wanted or 1, 1))
            tops.append([(self._word(i), v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)])
        if path == "completions":
            choice["text"] = text
            choice["logprobs"] = None if not wanted else {
                "tokens": [t for t, _ in chosen], "token_logprobs": [v for _, v in chosen], "top_logprobs": [dict(t) for t in tops]
            }  # fmt: skip
        else:
            choice["message"] = {"role": "assistant", "content": text}
            content = [
                {"token": t, "logprob": v, "bytes": list(t.encode()),
                 "top_logprobs": [{"token": a, "logprob": b, "bytes": list(a.encode())} for a, b in top]}
                for (t, v), top in zip(chosen, tops, strict=True)
            ]  # fmt: skip
            choice["logprobs"] = {"content": content} if body.get("logprobs") else None
        return found

    def _word(self, token: int) -> str:
        """Return the text of one token, decoded once."""
        if token not in self.words:
            tokenizer = getattr(self.model.processor, "tokenizer", self.model.processor)
            self.words[token] = tokenizer.decode([token])
        return self.words[token]

    def _computed(self, inputs: Any, adapter: str | None, new_tokens: int) -> tuple[list[int], torch.Tensor, int]:
        """Return the greedy tokens, their logits [S, V], and how long the prompt is."""
        model = self.model
        request = GenerateRequest(max_new_tokens=new_tokens)
        tokens = list(model.answer_inputs(inputs, request, adapter=adapter).token_ids)
        model.adapter_store.set(adapter)
        logits, _ = teacher_forcing.forward(model.hf_model, teacher_forcing.extended(dict(inputs.tensors), tokens[:-1]))
        model.adapter_store.set(None)
        return tokens, logits[0, inputs.prompt_tokens - 1 :].float(), inputs.prompt_tokens

    def _inputs(self, body: Mapping[str, Any]) -> Any:
        model = self.model
        if "prompt" in body:
            prompt = body["prompt"]
            if isinstance(prompt, str):
                tokenizer = getattr(model.processor, "tokenizer", model.processor)
                prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            return model.prepare(list(prompt))
        messages = [{"role": one["role"], "content": self._parts(one["content"])} for one in body["messages"]]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return model.prepare(messages)

    def _parts(self, content: Any) -> Any:
        if isinstance(content, str):
            return content
        made = []
        for place, part in enumerate(content):
            if part["type"] == "text":
                made.append(part)
                continue
            is_image = part["type"] == "image_url"
            data = part["image_url"]["url"].partition(",")[2] if is_image else part["input_audio"]["data"]
            file = Path(self._folder.name) / f"{place}.{'png' if is_image else 'wav'}"
            file.write_bytes(base64.b64decode(data))
            made.append({"type": "image" if is_image else "audio", "image" if is_image else "audio": str(file)})
        return made


class Both(Planted):
    """A server with two models: the adapter's and the base's may be different loaded models."""

    def __init__(self, planted: Planted, base: Planted) -> None:
        super().__init__(None, {"m": None, "b": None})
        self._parts = {"m": planted, "b": base}

    def transport(self) -> Any:
        for part in self._parts.values():
            part.transport()
        return super().transport()

    async def _answer(self, request: Any) -> Any:
        if request.url.path.endswith("/models"):
            return await super()._answer(request)
        body = json.loads(await request.aread())
        return await self._parts[body["model"]]._answer(request)


def _refused(status: int, message: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": message}})
