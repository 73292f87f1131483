"""`trimtab verify --against ollama:NAME`: a stand-in that speaks Ollama's own API over the demo model."""

import json

import httpx2
import pytest
import torch

import trimtab
from bench.planted import Planted
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.verification.server import verify

BASE, STYLE = DEMO / "base", DEMO / "adapters" / "style"


class Ollama(Planted):
    """Ollama's /api/tags and /api/generate. As Ollama does, it puts the start token before a raw prompt by itself."""

    def __init__(self, model, names, **options):
        super().__init__(model, names, **options)
        self.bodies = []

    async def _answer(self, request):
        self.requests += 1
        if request.url.path == "/api/tags":
            return httpx2.Response(200, json={"models": [{"name": f"{name}:latest"} for name in self.names]})
        if request.url.path != "/api/generate":
            return httpx2.Response(404, text="404 page not found")
        body = json.loads(await request.aread())
        self.bodies.append(body)
        if body["model"] not in self.names:
            return httpx2.Response(404, json={"error": f"model '{body['model']}' not found"})
        assert body["raw"] is True and body["stream"] is False
        tokenizer = self.model.processor.tokenizer
        ids = [tokenizer.bos_token_id, *tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]]
        adapter = self.names[body["model"]]
        key = (adapter, tuple(ids), body["options"]["num_predict"])
        if key not in self.share:
            self.share[key] = self._computed(self.model.prepare(ids), adapter, body["options"]["num_predict"])
        tokens, last, count = self.share[key]
        answer = {"model": body["model"], "response": tokenizer.decode(tokens), "done": True, "prompt_eval_count": count}
        if body.get("logprobs") and self.top:
            answer["logprobs"] = [
                self._entry(token, float(row[token]))
                | {"top_logprobs": [self._entry(other, float(row[other])) for other in row.topk(body["top_logprobs"]).indices]}
                for token, row in zip(tokens, torch.log_softmax(last, dim=-1), strict=True)
            ]
        return httpx2.Response(200, json=answer)

    def _entry(self, token, logprob):
        text = self._word(int(token))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@pytest.fixture(scope="module")
def served():
    plan = trimtab.plan(BASE, adapters={"style": STYLE}, quant="none", context=256)
    with trimtab.load(plan, decode="eager") as model:
        yield model


def ask(server, against="ollama:mine", **options):
    return verify.verify_remote(
        BASE, adapters={"style": STYLE}, against=against, transport=server.transport(), quant="none", new_tokens=4, **options,
    )  # fmt: skip


@pytest.mark.usefixtures("few_questions")
def test_an_adapter_in_ollama_is_alive_by_raw_generation_with_logprobs(served):
    server = Ollama(served, {"mine": "style", "gemma": None})
    report = ask(server, remote_base="gemma")
    assert (report.verdict.word, report.url) == ("alive", "http://127.0.0.1:11434")
    channel = report.channels["text"]
    assert (channel.name, channel.top) == ("raw generation, start token left to the server", 20)
    assert report.notes == ()
    assert {body["model"] for body in server.bodies} == {"mine", "gemma"}


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_an_adapter_that_ollama_ignores_shows_in_releases_without_logprobs_too(served):
    server = Ollama(served, {"mine": None, "gemma": None}, top=0)
    report = ask(server, remote_base="gemma")
    assert (report.verdict.word, report.channels["text"].top) == ("ignored", 0)


@pytest.mark.usefixtures("few_questions")
def test_a_model_that_ollama_does_not_have_is_named(served):
    with pytest.raises(RequestError, match="model 'other' not found"):
        ask(Ollama(served, {"mine": "style"}), against="ollama:other")


@pytest.mark.parametrize(("variable", "url"), [
    ("", "http://127.0.0.1:11434"), ("10.0.0.7:4000", "http://10.0.0.7:4000"), ("10.0.0.7", "http://10.0.0.7:11434"),
    ("0.0.0.0", "http://127.0.0.1:11434"), ("0.0.0.0:4000", "http://127.0.0.1:4000"), (":4000", "http://127.0.0.1:4000"),
    ("https://ollama.example", "https://ollama.example"), ("[::1]", "http://[::1]:11434"), ("[::1]:4000", "http://[::1]:4000"),
])  # fmt: skip
def test_the_host_of_ollama_is_read_as_its_own_client_reads_it(monkeypatch, variable, url):
    monkeypatch.setenv("OLLAMA_HOST", variable)
    assert verify._server("ollama:mine", None) == (url, "mine", True)
