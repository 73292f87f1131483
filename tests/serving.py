"""A pool without models: it answers what the test wrote down, and remembers what it was asked."""

import asyncio
from itertools import accumulate

from starlette.testclient import TestClient

from tests.waiting import turns
from trimtab.errors import RequestError
from trimtab.serve.contract.errors import UnknownModelError
from trimtab.serve.contract.job import Event, Token
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.observe.metrics import Metrics

USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def words(job, *texts, finish="stop"):
    """Return the events of an answer in these pieces, with logprobs if the job asks for them."""
    places = accumulate(texts, lambda place, text: place + len(text), initial=0)
    tokens = [(token(text, offset=place),) if job.top_logprobs is not None else () for text, place in zip(texts, places)]
    pieces = [Event(job.id, "text", text=text, tokens=one) for text, one in zip(texts, tokens, strict=True)]
    return [Event(job.id, "started"), *pieces, Event(job.id, "done", finish=finish, usage=USAGE)]


RESULTS = {
    "embedding": {"embedding": [0.6, 0.8]}, "tokens": {"tokens": [5, 6], "token_strs": ["a", "b"]}, "text": {"prompt": "a b"},
}  # fmt: skip


def answered(job):
    """Return what a job of any kind is told."""
    if job.kind == "answer":
        return words(job, "Hello", " there")
    return [Event(job.id, "done", finish="stop", usage={**USAGE, "completion_tokens": 0}, result=RESULTS[job.kind])]


def token(text, logprob=-0.5, offset=0):
    return Token(1, text, logprob, ((1, text, logprob), (2, "x", -3.0)), offset)


def failed(job, name, message="no", **fields):
    error = {"class": name, "message": message, "fields": fields}
    return Event(job.id, "error", finish="error", error=error)


class MockPool:
    """answers: job -> events, an error to raise, or an async generator's function. Everything else is written down."""

    def __init__(self, answers=None, *, adapters=("style",), takes=("text", "image", "audio"), context=384):
        self.answers = answers or answered
        self.adapters, self._takes, self._context = list(adapters), takes, context
        self.jobs, self.left, self.calls, self.refreshes = [], [], [], 0
        self.is_ready, self.is_started, self.drained = True, False, None

    def resolve(self, name, *, field="model"):
        if name == "demo":
            return "demo", None
        adapter = name.removeprefix("demo:")
        if adapter in self.adapters:
            return "demo", adapter
        raise UnknownModelError(name, ["demo", *self.adapters])

    def context_tokens(self, model):
        return self._context

    def most_jobs(self, model):
        return 96

    def takes(self, model):
        return self._takes

    async def refresh(self):
        self.refreshes += 1

    async def submit(self, model, job, on_dropped=None):
        self.jobs.append(job)
        try:
            found = self.answers(job)
            if hasattr(found, "__aiter__"):
                async for event in found:
                    yield event
            else:
                for event in found:
                    if isinstance(event, Exception):
                        raise event
                    yield event
        finally:
            self.left.append(job.id)

    async def load_adapter(self, model, name, path):
        self.calls.append(("load", model, name, path))
        if name == "bad":
            raise RequestError("is bad", field="lora_name", value=name)
        self.adapters.append(name)

    async def unload_adapter(self, model, name):
        self.calls.append(("unload", model, name))
        if name not in self.adapters:
            raise RequestError("no adapter of this name is loaded", field="lora_name", value=name)
        self.adapters.remove(name)

    def models(self):
        head = {"object": "model", "created": 0, "owned_by": "trimtab"}
        return [
            {"id": "demo", **head, "root": "demo", "parent": None},
            *({"id": name, **head, "root": name, "parent": "demo"} for name in sorted(self.adapters)),
        ]

    def status(self):
        return {
            "models": [
                {"name": "demo", "state": "ready", "restarts": 1, "numbers": {"waiting": 3}, "tier_bytes": {"resident": 5},
                 "plan": {"request": {"model": "/home/someone/models/demo"}}}
            ]
        }  # fmt: skip

    async def start(self):
        self.is_started = True

    async def drain(self, grace_s):
        self.drained = grace_s


async def forever(job):
    """An answer that says something and never ends."""
    yield Event(job.id, "text", text="so far")
    await asyncio.Event().wait()


def late(*ends):
    """Return an answer that says something and, once its stream has begun, these events or errors. ends: job -> one."""

    async def answer(job):
        yield Event(job.id, "text", text="so far")
        await turns(20)
        for end in ends:
            if isinstance(found := end(job), Exception):
                raise found
            yield found

    return answer


def client(pool=None, settings=None, *, base_url="http://localhost", raises=True, **options):
    app = make_app(pool or MockPool(), settings or Settings(page=False, **options), Metrics())
    return TestClient(app, base_url=base_url, raise_server_exceptions=raises)
