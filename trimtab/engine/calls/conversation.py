"""How does a conversation keep its turns, each answered by the adapter that was selected then?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint.names import check_options, near_names
from trimtab.engine.batch.generate import Answer, AnswerText, Detokenizer, Timed, hidden_ids, texts
from trimtab.engine.chat import prompt
from trimtab.engine.chat.answer_forms import THOUGHT_MARKS
from trimtab.engine.chat.answer_reader import AnswerReader
from trimtab.engine.chat.control_tokens import end_token_ids, tokenizer_of
from trimtab.engine.chat.media import SAMPLE_RATE, read_audio, read_image, several
from trimtab.engine.kv.sequence import Inputs
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest, check_choice

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np
    from PIL import Image
    from typing_extensions import Unpack

    from trimtab.engine.calls.asked_model import AskedModel, Chosen
    from trimtab.request import AnswerOptions

WHEN_FULL = ("error", "drop")
_OPTIONS = tuple(item.name for item in fields(GenerateRequest))
# An answer without a limit gets the rest of the context, and turns are dropped for at least this much of it.
LEAST_ANSWER_TOKENS = 256
LEAST_ANSWER_SHARE = 4  # of the context, one in this many


@dataclass(frozen=True, eq=False)
class Turn:
    """One message.

    role: "user" or "assistant". text, images, audios: its content; audios are (samples, rate). adapter: the adapter of an
    answer, None for the base. sources: the files or types that the images and audio were read from.
    """

    role: str
    text: str
    images: tuple[Image.Image, ...] = ()
    audios: tuple[tuple[np.ndarray, int], ...] = ()
    adapter: Chosen = None
    sources: tuple[str, ...] = ()

    def message(self) -> dict[str, object]:
        """Return the message in the form of a chat template: images, text, audio."""
        parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in self.images]
        parts += [{"type": "text", "text": self.text}] if self.text else []
        parts += [{"type": "audio", "audio": audio} for audio in self.audios]
        return {"role": self.role, "content": parts}

    @property
    def audio_s(self) -> float:
        """Seconds of audio in this message."""
        return sum(len(samples) for samples, rate in self.audios) / SAMPLE_RATE


class Conversation:
    """A conversation with one model. adapter, options: for answers without their own; both may be changed between turns.

    turns: questions and answers in order. left_out: number of the oldest turns that are no longer part of the prompt. last:
    the latest answer, with its timings. An answer without text leaves no turns. Of an answer with thoughts between control tokens,
    which its text shows, a turn has the rest.

        chat = model.chat(system="Answer briefly.", adapter="medical")
        for piece in chat.stream("What is on this image?", image="xray.png"): ...
        chat.send("And on the left?").text
    """

    def __init__(
        self,
        model: AskedModel,
        *,
        system: str | None = None,
        adapter: Chosen = None,
        when_full: str = "error",
        **options: Unpack[AnswerOptions],
    ) -> None:
        check_choice(when_full, WHEN_FULL, field_name="when_full")
        check_options(options, _OPTIONS)
        model.check_tokens(GenerateRequest(**options))  # type: ignore[arg-type]
        self._model, self._when_full = model, when_full
        self.system, self.adapter = system, adapter
        self.options: dict[str, object] = dict(options)
        self.turns: list[Turn] = []
        self.left_out = 0
        self.prompt_tokens = 0
        self.last: Answer | None = None

    @property
    def messages(self) -> list[dict[str, object]]:
        """The conversation as chat messages, system message first."""
        return self._messages(self.turns)

    def send(
        self,
        text: str,
        *,
        image: object = None,
        audio: object = None,
        adapter: Chosen | EllipsisType = ...,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """Return the answer to the next message.

        text, image, audio: the message; images and audio as in `LoadedModel.answer`, one or several. adapter, options: for
        this answer only. Errors: as `stream`.
        """
        for _ in self.stream(text, image=image, audio=audio, adapter=adapter, **options):
            pass
        assert self.last is not None
        return self.last

    def stream(
        self,
        text: str,
        *,
        image: object = None,
        audio: object = None,
        adapter: Chosen | EllipsisType = ...,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[str]:
        """Yield the answer to the next message as it arrives. Closing the iterator ends the answer and keeps the partial text.

        text, image, audio, adapter, options: as in `send`.
        Errors: RequestError for a message that is invalid or does not fit; the conversation does not change then.
        """
        turn = self._read(text, several(image), several(audio))
        return self._answer([*self.turns, turn], adapter, options, keep=True)

    def again(self, *, adapter: Chosen | EllipsisType = ..., **options: Unpack[AnswerOptions]) -> Iterator[str]:
        """Yield a new answer to the last question, which replaces the old one. adapter, options: for this answer only.

        Errors: RequestError if there is no question.
        """
        return self._answer(self._up_to_last_question(), adapter, options, keep=True)

    def beside(
        self, text: str | None = None, *, adapter: Chosen | EllipsisType = ..., **options: Unpack[AnswerOptions]
    ) -> Iterator[str]:
        """Yield an answer that the conversation does not keep: to `text`, or to the last question if it is None.

        adapter, options: for this answer only. Errors: as `stream`.
        """
        turns = self._up_to_last_question() if text is None else [*self.turns, self._read(text, (), ())]
        return self._answer(turns, adapter, options, keep=False)

    def resume(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Replace all turns by those of an earlier conversation: questions and answers in turn.

        messages: {"role": "user", "content": TEXT, "images": [SOURCE], "audios": [SOURCE]} and {"role": "assistant",
        "content": TEXT, "adapter": NAME}; sources as in `send`. Images and audio are read now.
        Errors: RequestError with the message's number; then the conversation does not change.
        """
        turns: list[Turn] = []
        for number, message in enumerate(messages):
            role = ("user", "assistant")[number % 2]
            try:
                turns.append(self._turn(message, role))
            except RequestError as exc:
                raise RequestError(f"{exc.field}: {exc.reason}", field=f"messages[{number}]", value=exc.value) from exc
        if len(turns) % 2:
            raise RequestError("the last question has no answer", field="messages")
        self.turns, self.left_out, self.prompt_tokens = turns, 0, 0

    def _turn(self, message: Mapping[str, object], role: str) -> Turn:
        """Return one saved message as a turn. Errors: RequestError."""
        if not isinstance(message, Mapping):
            raise RequestError("must be an object", field="message", value=type(message).__name__)
        known = ("role", "content", "images", "audios") if role == "user" else ("role", "content", "adapter")
        for key in message:
            if key not in known:
                raise RequestError("unknown key", field=str(key), allowed=known, near=near_names(str(key), known))
        if message.get("role") != role:
            raise RequestError("questions and answers take turns", field="role", value=message.get("role"), allowed=(role,))
        text = message.get("content")
        if role == "user":
            return self._read(text, several(message.get("images")), several(message.get("audios")))  # type: ignore[arg-type]
        if not isinstance(text, str) or not text.strip():
            raise RequestError("an answer has text", field="content", value=text)
        adapter = message.get("adapter")
        if not (adapter is None or isinstance(adapter, (str, Mapping))):
            raise RequestError("must be a name, a mix or nothing", field="adapter", value=adapter)
        return Turn("assistant", text, adapter=adapter)

    def clear(self) -> None:
        """Remove all turns; system message, adapter and options stay."""
        self.turns, self.left_out, self.prompt_tokens = [], 0, 0

    def _up_to_last_question(self) -> list[Turn]:
        turns = list(self.turns)
        while turns and turns[-1].role != "user":
            turns.pop()
        if not turns:
            raise RequestError("there is no question yet", field="prompt")
        return turns

    def _read(self, text: str, images: Sequence[object], audios: Sequence[object]) -> Turn:
        if not isinstance(text, str):
            raise RequestError("a message must be text", field="prompt", value=type(text).__name__)
        if not (text.strip() or images or audios):
            raise RequestError("is empty", field="prompt")
        limit_s = float(self._model.plan.request.audio_s)
        read = [(read_audio(audio, max_s=limit_s), SAMPLE_RATE) for audio in audios]
        sources = tuple(source if isinstance(source, str) else type(source).__name__ for source in (*images, *audios))
        return Turn("user", text, tuple(read_image(image) for image in images), tuple(read), sources=sources)

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, object]]:
        first: list[dict[str, object]] = [] if not self.system else [{"role": "system", "content": self.system}]
        return [*first, *(turn.message() for turn in turns)]

    def _fitted(self, turns: list[Turn], limit: int | None) -> tuple[Inputs, int, int]:
        """Return the prompt, the tokens that it leaves and how many of the oldest turns it leaves out. Errors: RequestError."""
        model = self._model
        left_out = min(self.left_out, len(turns) - 1)
        least = limit or min(LEAST_ANSWER_TOKENS, max(1, model.context_tokens // LEAST_ANSWER_SHARE))
        while True:
            kept = turns[left_out:]
            following = next((place for place in range(left_out + 1, len(turns)) if turns[place].role == "user"), None)
            may_drop = self._when_full == "drop" and following is not None
            if may_drop and not self._has_room_for_media(kept):
                left_out = following or 0
                continue
            inputs = model.prepare(self._messages(kept))
            room = model.context_tokens - inputs.prompt_tokens
            if room < least and may_drop:
                left_out = following or 0
                continue
            prompt.check_fits(model, inputs, limit or 1)
            return inputs, room, left_out

    def _has_room_for_media(self, turns: Sequence[Turn]) -> bool:
        request = self._model.plan.request
        images, audio_s = sum(len(turn.images) for turn in turns), sum(turn.audio_s for turn in turns)
        return images <= request.images and audio_s <= request.audio_s

    def _answer(
        self, turns: list[Turn], adapter: Chosen | EllipsisType, options: Mapping[str, object], *, keep: bool
    ) -> Iterator[str]:
        used = self.adapter if adapter is ... else adapter
        merged: dict[str, Any] = {**self.options, **options}
        check_options(merged, _OPTIONS)
        request = GenerateRequest(**merged)
        self._model.check_adapter(used)
        inputs, room, left_out = self._fitted(turns, request.max_new_tokens)
        request = request.within(room, most_tokens=room)
        self._model.check_tokens(request)
        timed = Timed(self._model, inputs, request)
        return self._pieces(timed, turns, used, left_out, keep=partial(_said, self._model, inputs, request) if keep else None)

    def _pieces(
        self, timed: Timed, turns: list[Turn], adapter: Chosen, left_out: int, *, keep: Callable[[Answer], str] | None
    ) -> Iterator[str]:  # fmt: skip
        try:
            yield from texts(timed, self._model.answering(adapter))
        finally:
            answer = self.last = timed.answer
            if keep is not None and (said := keep(answer)).strip():
                self.turns = [*turns, Turn("assistant", said, adapter=adapter)]
                self.left_out = left_out
                self.prompt_tokens = answer.prompt_tokens + len(answer.token_ids)


def _said(model: AskedModel, inputs: Inputs, request: GenerateRequest, answer: Answer) -> str:
    """Return an answer's text without thoughts whose marks are control tokens, which no text shows: a template that leaves old
    thoughts out finds no mark there. Thoughts between other marks stay: the template sees those."""
    tokenizer = tokenizer_of(model.processor)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if special.isdisjoint(close for _, close in THOUGHT_MARKS):
        return answer.text
    form = prompt.answer_form(model.processor)
    if form.thoughts is None or form.thoughts[1] not in special:
        return answer.text
    ends = {*end_token_ids(model.hf_model), *request.stop_token_ids}
    text = AnswerText(Detokenizer(tokenizer, request.stop, hidden=hidden_ids(tokenizer, form.thought_marks)), ends)
    begun = str(tokenizer.decode(list(inputs.token_ids[-8:]), skip_special_tokens=False)).rstrip()
    reader = AnswerReader(form, in_thought=begun.endswith(form.thoughts[0]))
    parts = [*reader.push("".join(map(text.take, answer.token_ids)) + text.end()), *reader.finish()]
    return "".join(value for kind, value in parts if kind == "text").replace(form.thoughts[1], "")  # one that closes nothing
