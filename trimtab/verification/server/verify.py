"""Does a server answer with the adapter in a folder?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.names import near_names
from trimtab.errors import AdapterError, DoesNotFitError, RequestError
from trimtab.process import phases
from trimtab.process.packages import stack_versions
from trimtab.process.work_folder import work_folder
from trimtab.request import DEFAULT_QUANT, REQUANTIZE, LoadRequest
from trimtab.verification.routes import prompts as asked_prompts
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.server import verdict as judging
from trimtab.verification.server.answers import Said
from trimtab.verification.server.channels import (
    TOP,
    TOP_SMALL,
    Channel,
    Opened,
    Question,
    chat_channel,
    ollama_channels,
    open_channel,
    openai_channels,
)
from trimtab.verification.server.choosing import Chosen, candidates, choose
from trimtab.verification.server.client import DEADLINE_S, Client, read_key
from trimtab.verification.server.faults import Fault, write_faults
from trimtab.verification.server.local import Reference, Row, open_reference
from trimtab.verification.server.report import Answered, RemoteReport
from trimtab.verification.server.tokens import TokenTable
from trimtab.verification.server.verdict import RIGHT, Asked, Verdict, judge, nothing_to_tell

# One token that a server calls impossible must not outweigh all the others.
LARGEST = 10.0
# Number of the local most likely tokens on which a fault is measured if the server returns none.
OWN_TOP = 5


@dataclass(frozen=True)
class Values:
    """One hypothesis on one row: the logprobs of the compared tokens, and the distance from the server's answer."""

    logprobs: Tensor
    distance: float


@dataclass
class Measured:
    """Every hypothesis on every row. `ids` are the compared tokens: (position, token) pairs of each row."""

    rows: Sequence[Row]
    ids: list[list[tuple[int, int]]] = field(default_factory=list)
    values: dict[str, list[Values]] = field(default_factory=dict)

    def take_right(self, logprobs: Sequence[Tensor]) -> None:
        """Record the right answers first: they define the compared tokens if the server returns none."""
        self.ids = [_compared(row, one) for row, one in zip(self.rows, logprobs, strict=True)]
        self.take(RIGHT, logprobs)

    def take(self, name: str, logprobs: Sequence[Tensor]) -> None:
        """Record the logits of a hypothesis for all rows."""
        self.values[name] = [_values(row, ids, one) for row, ids, one in zip(self.rows, self.ids, logprobs, strict=True)]

    def distance(self, name: str, place: int) -> float:
        return self.values[name][place].distance

    def size(self, name: str, other: str, place: int) -> float:
        """Return the distance of two hypotheses on one row."""
        a, b = self.values[name][place].logprobs, self.values[other][place].logprobs
        return float((a - b).abs().clamp(max=LARGEST).mean())


def _compared(row: Row, logprobs: Tensor) -> list[tuple[int, int]]:
    if row.tops:
        return [(place, token) for place, top in enumerate(row.tops) for token in top]
    likely = torch.topk(logprobs, min(OWN_TOP, logprobs.shape[1]), dim=-1).indices.tolist()
    return [(place, token) for place, tokens in enumerate(likely) for token in tokens]


def _values(row: Row, ids: Sequence[tuple[int, int]], logprobs: Tensor) -> Values:
    places, tokens = (torch.tensor(column) for column in zip(*ids, strict=True))
    own = logprobs[places, tokens]
    if not row.tops:
        chosen = logprobs[torch.arange(len(row.tokens)), torch.tensor(row.tokens)]
        behind = logprobs.max(dim=-1).values - chosen
        return Values(own, float(behind.clamp(max=LARGEST).mean()))
    theirs = torch.tensor([row.tops[place][token] for place, token in ids])
    return Values(own, float((own - theirs).abs().clamp(max=LARGEST).mean()))


def between(a: Row, b: Row) -> float:
    """Return the distance of two answers of a server to one question, over their common prefix."""
    if not (a.tops and b.tops):
        return 0.0 if a.tokens == b.tokens else LARGEST
    gaps: list[float] = []
    for place in range(min(len(a.tops), len(b.tops))):
        gaps += _gaps(a.tops[place], b.tops[place])
        if a.tokens[place] != b.tokens[place]:
            break
    return sum(gaps) / len(gaps)


def _gaps(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    # A token in only one of the lists is at most as likely in the other as that list's last token.
    low_a, low_b = min(a.values()), min(b.values())
    return [min(abs(a.get(token, low_a) - b.get(token, low_b)), LARGEST) for token in {*a, *b}]


# In this order: the first precision also chooses the questions.
PRECISIONS = ("none", REQUANTIZE[0], "int8", DEFAULT_QUANT)
NEW_TOKENS = 8
CONTEXT_TOKENS = 1024
AUDIO_S = 30.0
# A base nearer than this has the same precision: no other precision is tried.
SAME_PRECISION = 0.1
OLLAMA = "ollama:"
OLLAMA_PORT = "11434"
# If the server's base is farther from the local base than this share of the adapter's effect, they are not the same
# model.
OTHER_BASE = 0.3


@dataclass
class _Work:
    """The state while a server is examined."""

    client: Client
    remote_model: str
    remote_base: str | None
    channels: dict[str, Opened] = field(default_factory=dict)
    chosen: list[Chosen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    base_rows: dict[str, Row] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    base_noise: dict[str, dict[str, float]] = field(default_factory=dict)  # precision -> question -> distance
    residuals: dict[str, float] = field(default_factory=dict)


def verify_remote(
    model: str | Path, *, adapters: Mapping[str, str | Path], against: str, remote_model: str | None = None,
    remote_base: str | None = None, adapter: str | None = None,
    prompts: str | Path | Sequence[Prompt | Mapping[str, Any] | str] | None = None, send_prompts: bool = False,
    quant: str | None = None, api_key_env: str | None = None, deadline_s: float = DEADLINE_S,
    new_tokens: int = NEW_TOKENS, placed: LoadRequest | None = None, transport: Any = None,
) -> RemoteReport:  # fmt: skip
    """Return a report on the adapter of a server.

    model: the checkpoint. adapters: name -> folder; `adapter` is the expected one (the only one by default), the others
    are possible mix-ups. against: the address of an OpenAI-compatible server ("http://host:8000/v1"), or "ollama:NAME".
    remote_model: the server's name for the adapter. remote_base: for the base; with it the precision and the noise are
    measured, without it they are guessed and the verdict is more careful. prompts: the user's questions; they are sent
    only with send_prompts. quant: compare only in this precision. placed: budgets of the local model.
    Errors: RequestError for an invalid request and for a server that does not answer; CheckpointError, AdapterError.

    The local base, adapter and known faults are evaluated along the server's tokens, in the precision in which the local base is
    nearest to the server's. A distance is the mean difference of the returned logprobs; of text alone, of the log-probabilities of
    the local next token and the server's token at each position.
    """
    started = time.monotonic()
    url, remote_model, is_ollama = _server(against, remote_model)
    own_prompts = _own_prompts(prompts, send_prompts)
    name = _adapter_name(adapters, adapter)
    others = {other: Path(folder) for other, folder in adapters.items() if other != name}
    client = Client(url, key=read_key(api_key_env), deadline_s=deadline_s, transport=transport)
    checkpoint = read_checkpoint(model)
    precisions = _precisions(checkpoint, quant)
    work = _Work(client, remote_model, remote_base)
    own = replace(
        placed or LoadRequest(model=str(model)), model=str(checkpoint.folder), images=1, audio_s=AUDIO_S, quant="auto",
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    notes_of_server(work, is_ollama)
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder("remote"))

        def opened(precision: str) -> Any:
            phases.begin(f"loading {checkpoint.folder.name} ({precision})")
            return open_reference(own, precision, name, adapters[name], others=others)

        verdict, precision = _examine(work, opened, precisions, checkpoint, own_prompts, others, folder, new_tokens, is_ollama)
    return _report(work, verdict, precision, model=checkpoint.folder, adapter=name, path=adapters[name], started=started)


# Questions ------------------------------------------------------------------------------------------------------------


def _server(against: str, remote_model: str | None) -> tuple[str, str, bool]:
    if against.startswith(OLLAMA):
        name = against.removeprefix(OLLAMA) or remote_model
        if not name or (remote_model and name != remote_model):
            raise RequestError("names the model of Ollama once", field="against", value=against, allowed=("ollama:NAME",))
        return _ollama_url(os.environ.get("OLLAMA_HOST", "")), name, True
    if not remote_model:
        raise RequestError(
            "is missing: which of the server's models has the adapter?", field="remote_model",
            hint="GET /v1/models lists them",
        )  # fmt: skip
    return against, remote_model, False


def _ollama_url(host: str) -> str:
    """Return the address that Ollama's client takes from OLLAMA_HOST: with the default port, never "any address"."""
    if "://" in host:
        return host
    name, colon, port = host.strip().rpartition(":") if not host.endswith("]") else (host, "", "")
    name, port = (name, port) if colon else (port or name, "")
    if name in ("", "0.0.0.0", "[::]"):
        name = "127.0.0.1"
    return f"http://{name}:{port or OLLAMA_PORT}"


def _own_prompts(prompts: Any, send_prompts: bool) -> tuple[Prompt, ...] | None:
    if prompts is None and send_prompts:
        raise RequestError("has no effect without prompts", field="send_prompts")
    if prompts is not None and not send_prompts:
        raise RequestError(
            "your own prompts would be sent to the server", field="prompts", value=str(prompts)[:200],
            hint="Pass send_prompts if they may leave this machine",
        )  # fmt: skip
    return asked_prompts.given_prompts(prompts)


def _adapter_name(adapters: Mapping[str, Any], adapter: str | None) -> str:
    if not adapters:
        raise RequestError("give the adapter that the server should answer with", field="adapters")
    if adapter is None and len(adapters) > 1:
        raise RequestError("which one should the server answer with?", field="adapter", allowed=tuple(adapters))
    if adapter is not None and adapter not in adapters:
        near = near_names(adapter, adapters)
        raise RequestError("no adapter of this name is given", field="adapter", value=adapter, allowed=tuple(adapters), near=near)
    return adapter or next(iter(adapters))


def _precisions(checkpoint: Checkpoint, quant: str | None) -> tuple[str, ...]:
    if quant is not None:
        return (quant,)
    return ("auto",) if checkpoint.quantization is not None else PRECISIONS


def notes_of_server(work: _Work, is_ollama: bool) -> None:
    """Add a note if a server lists its models and the requested one is missing."""
    reply = work.client.get("/api/tags" if is_ollama else "/models")
    listed = reply.value.get("models" if is_ollama else "data") if isinstance(reply.value, dict) else None
    if not isinstance(listed, list):
        return
    names = [entry.get("name" if is_ollama else "id") for entry in listed[:1000] if isinstance(entry, dict)]
    names = [one for one in names if isinstance(one, str)]
    for name in (work.remote_model, work.remote_base):
        if name is not None and names and name not in names and f"{name}:latest" not in names:
            work.notes.append(f"the server does not list a model {name!r}: it may answer with another one")


# The examination ------------------------------------------------------------------------------------------------------


def _examine(
    work: _Work, opened: Callable[[str], Any], precisions: Sequence[str], checkpoint: Checkpoint,
    given: Sequence[Prompt] | None, others: Mapping[str, Path], folder: Path, new_tokens: int, is_ollama: bool,
) -> tuple[Verdict, str]:  # fmt: skip
    words: list[tuple[str, str, bool]] = []
    for place, precision in enumerate(precisions):
        try:
            with opened(precision) as reference:
                if place == 0:
                    _begin(work, reference, checkpoint, given, others, folder, new_tokens, is_ollama)
                    words = [(fault.name, fault.what, fault.is_part) for fault in work.faults]
                    if not work.chosen:
                        reason = "adapter and base give the same answers to every question that was tried"
                        return nothing_to_tell(reason, words), precision
                    if not work.rows:
                        return nothing_to_tell("the server's answers contain no token of this tokenizer", words), precision
                work.residuals[precision] = _residual(work, reference, precision)
                if len(precisions) == 1 or work.residuals[precision] <= SAME_PRECISION:
                    return _weigh(work, reference, precision), precision
        except DoesNotFitError:
            if place == 0:
                raise
            work.notes.append(f"{precision} does not fit this machine: not tried")
    best = min(work.residuals, key=lambda one: work.residuals[one])
    with opened(best) as reference:
        return _weigh(work, reference, best), best


def _begin(
    work: _Work, reference: Reference, checkpoint: Checkpoint, given: Sequence[Prompt] | None, others: Mapping[str, Path],
    folder: Path, new_tokens: int, is_ollama: bool,
) -> None:  # fmt: skip
    """Write the faults, choose the questions and query the server."""
    work.faults, work.not_tried = write_faults(reference.spec, folder, others)
    is_demo = checkpoint.folder.resolve() == (asked_prompts.DEMO / "base").resolve()
    phases.begin("choosing questions")
    possible = candidates(reference, given, is_demo=is_demo, config=checkpoint.config, work=folder)
    if given is None:
        kinds = _kinds(reference)
        possible = [question for question in possible if all(part in kinds for part in question.kind.split("+"))]
    work.chosen = choose(reference, possible, new_tokens)
    if work.chosen:
        _open_channels(work, reference, is_ollama)
        _ask_all(work, reference, new_tokens)


def _kinds(reference: Reference) -> set[str]:
    """Return the kinds of questions that show the adapter: texts, and images or audio if it changes their towers or
    connectors."""
    parts = {target.part for target in reference.spec.targets}
    towers = {"vision": {"image"}, "audio": {"audio"}, "connector": {"image", "audio"}}
    return {"text"}.union(*(kinds for part, kinds in towers.items() if part in parts))


def _open_channels(work: _Work, reference: Reference, is_ollama: bool) -> None:
    start = reference.tokenizer.bos_token or ""
    kinds = {one.question.kind: one.question for one in reversed(work.chosen)}
    if "text" in kinds:
        channels = ollama_channels(start) if is_ollama else openai_channels(start)
        work.channels["text"] = open_channel(work.client, work.remote_model, channels, kinds["text"])
        work.notes += work.channels["text"].notes
    for kind in kinds:
        if kind == "text":
            continue
        try:
            if is_ollama:
                raise RequestError("Ollama's raw generation takes none", field=kind)
            channels = [chat_channel(TOP), chat_channel(TOP_SMALL), chat_channel(0)]
            work.channels[kind] = open_channel(work.client, work.remote_model, channels, kinds[kind])
        except RequestError as exc:
            if not work.channels:
                raise
            work.notes.append(f"{kind} questions were not sent ({str(exc)[:300]})")


def _ask_all(work: _Work, reference: Reference, new_tokens: int) -> None:
    table = TokenTable(reference.tokenizer)
    work.chosen = [one for one in work.chosen if one.question.kind in work.channels]
    each = 2 if work.remote_base else 1
    # Every question costs a request to the adapter and one to the base; the less informative ones are dropped first.
    while work.chosen and each * len(work.chosen) > work.client.requests_left:
        work.chosen.remove(min(work.chosen, key=lambda one: one.kl))
    for kind, opened in work.channels.items():
        questions = [one.question for one in work.chosen if one.question.kind == kind]
        phases.begin(f"sending the server {each * len(questions)} {kind} questions ({opened.channel.name})")
        for question, answer in _answers(work, opened.channel, work.remote_model, questions, new_tokens):
            row = _row(reference, table, opened.channel, question, answer)
            if row is not None:
                work.rows.append(row)
                work.said[question.id] = answer.text
        if work.remote_base is None:
            continue
        for question, answer in _answers(work, opened.channel, work.remote_base, questions, new_tokens):
            row = _row(reference, table, opened.channel, question, answer)
            if row is not None:
                work.base_rows[question.id] = row
    lost = len(work.chosen) - len(work.rows)
    if lost:
        work.notes.append(f"{lost} of {len(work.chosen)} answers could not be read")


def _answers(
    work: _Work, channel: Channel, model: str, questions: Sequence[Question], new_tokens: int
) -> list[tuple[Question, Said]]:
    bodies = [(question, body) for question in questions if (body := channel.body(model, question, new_tokens))]
    replies = work.client.post_each(channel.path, [body for _, body in bodies])
    answers = []
    for (question, _), reply in zip(bodies, replies, strict=True):
        answer = channel.read(reply.value) if reply.status == 200 else None
        if answer is not None:
            answers.append((question, answer))
    if bodies and not answers:
        raise RequestError(
            f"answers no request for {model!r}: status {replies[0].status} {replies[0].words}", field="against",
            value=work.client.url, hint="Check remote_model and remote_base",
        )  # fmt: skip
    return answers


def _row(reference: Reference, table: TokenTable, channel: Channel, question: Question, answer: Said) -> Row | None:
    if channel.top:
        positions = table.positions(answer)
        if not positions:
            return None
        return Row(question, tuple(token for token, _ in positions), tuple(top for _, top in positions))
    ids = reference.tokenizer(answer.text, add_special_tokens=False)["input_ids"][:NEW_TOKENS]
    return Row(question, tuple(ids), ()) if ids else None


# Weighing -------------------------------------------------------------------------------------------------------------


def _residual(work: _Work, reference: Reference, precision: str) -> float:
    """Return the server's distance from this precision: of the base if it was queried, else of the nearer of base and adapter."""
    if work.base_rows:
        rows = list(work.base_rows.values())
        measured = Measured(rows)
        measured.take_right(reference.rows(rows, None))
        noise = {row.question.id: measured.distance(RIGHT, place) for place, row in enumerate(rows)}
        work.base_noise[precision] = noise
        return sum(noise.values()) / len(noise)
    measured = Measured(work.rows)
    measured.take_right(reference.rows(work.rows, reference.adapter))
    measured.take("base", reference.rows(work.rows, None))
    count = len(work.rows)
    return min(sum(measured.distance(name, place) for place in range(count)) / count for name in (RIGHT, "base"))


def _weigh(work: _Work, reference: Reference, precision: str) -> Verdict:
    phases.begin("comparing with the adapter, the base and known faults")
    measured = Measured(work.rows)
    measured.take_right(reference.rows(work.rows, reference.adapter))
    kept: list[Fault] = []
    for fault in work.faults:
        try:
            if fault.folder is None:
                measured.take(fault.name, reference.rows(work.rows, None))
            else:
                with reference.instead(fault.folder) as name:
                    measured.take(fault.name, reference.rows(work.rows, name))
            kept.append(fault)
        except (AdapterError, DoesNotFitError) as exc:
            work.not_tried.append(f"{fault.name}: {str(exc).splitlines()[0]}")
    work.faults = kept
    questions = [_asked(work, measured, precision, place) for place in range(len(work.rows))]
    questions = _without_other_bases(work, questions)
    words = [(fault.name, fault.what, fault.is_part) for fault in kept]
    others = [(row, work.base_rows.get(row.question.id)) for row in work.rows]
    same = bool(work.base_rows) and all(one and (one.tokens, one.tops) == (row.tokens, row.tops) for row, one in others)
    if not questions:
        return nothing_to_tell("the server's base is not that of the checkpoint", words)
    return judge(questions, words, is_same_as_base=same, has_logprobs=any(row.tops for row in work.rows))


def _asked(work: _Work, measured: Measured, precision: str, place: int) -> Asked:
    row = work.rows[place]
    ignored = work.faults[0].name
    distances = {name: measured.distance(name, place) for name in measured.values}
    base = work.base_rows.get(row.question.id)
    if base is not None:
        # The server's base represents an ignored adapter as well as the local base does, in any precision.
        distances[ignored] = min(distances[ignored], between(row, base))
    sizes = {fault.name: measured.size(RIGHT, fault.name, place) for fault in work.faults}
    noise = work.base_noise.get(precision, {}).get(row.question.id)
    return Asked(row.question.id, row.question.kind, distances, sizes, noise)


def _without_other_bases(work: _Work, questions: list[Asked]) -> list[Asked]:
    """Return the questions of the kinds on which the server's base equals the local one, with a note for the others: a template,
    a tokenizer or another base differs. An ignored adapter is still detected: then adapter and base agree."""
    kept: list[Asked] = []
    for kind in dict.fromkeys(one.kind for one in questions):
        group = [one for one in questions if one.kind == kind]
        known = [one for one in group if one.base_noise is not None]
        noise = sum(one.base_noise or 0.0 for one in known) / len(known) if known else 0.0
        effect = sum(one.size[work.faults[0].name] for one in group) / len(group)
        if noise > OTHER_BASE * effect and noise > judging.TIMES_NOISE * SAME_PRECISION:
            is_ignored = all(one.distance[work.faults[0].name] <= SAME_PRECISION * effect for one in group)
            work.notes.append(
                f"on {kind} questions the server's base differs from ours by {noise:.2g} where the adapter makes "
                f"{effect:.2g}: its template, tokenizer, preparation of media, precision or base differs"
            )
            if not is_ignored:
                continue
        kept += group
    return kept


def _report(
    work: _Work, verdict: Verdict, precision: str, *, model: Path, adapter: str, path: str | Path, started: float
) -> RemoteReport:
    kls = {one.question.id: one for one in work.chosen}
    answered = tuple(
        Answered(row.question.id, row.question.kind, kls[row.question.id].kl, work.said[row.question.id]) for row in work.rows
    )
    return RemoteReport(
        url=work.client.url, remote_model=work.remote_model, remote_base=work.remote_base, model=str(model), adapter=adapter,
        adapter_path=str(path), verdict=verdict, precision=precision, residuals=dict(work.residuals),
        channels={kind: opened.channel for kind, opened in work.channels.items()},
        refusals={kind: opened.refusals for kind, opened in work.channels.items()}, answered=answered,
        not_tried=tuple(work.not_tried), notes=tuple(work.notes), requests=work.client.requests,
        server_s=work.client.waited_s, seconds=time.monotonic() - started, versions=stack_versions(),
    )  # fmt: skip
