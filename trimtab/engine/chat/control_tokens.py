"""Which control tokens does a vocabulary have, how does user text never become one, and which of them end an answer?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from trimtab.engine.formats.hf_types import PlacedModel
from trimtab.engine.templates.budget import REFUSALS, render
from trimtab.errors import CheckpointError, RequestError
from trimtab.process.redact import map_texts

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel, Processor, Tokenizer
    from trimtab.request import Message

Encoded = TypeVar("Encoded", bound="MutableMapping[str, Any]")

# A token in this form is a control token whether it is flagged as special or not.
_CONTROL_FORM = re.compile(r"<\|.*>|<.*\|>|<unused\d+>", re.DOTALL)
_NO_LETTER = re.compile(r"[^\w\s]")
# Unicode's private planes: characters that no text needs.
_PRIVATE = range(0xF0000, 0x10FFF0)
# The fields of an encoding with one value per token.
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class PromptText:
    """A rendered prompt. user_spans: of control tokens that users wrote, wholly or in part. harmless: the same
    conversation without a sign of any, for tokenizers that search the normalized text. opening: the common beginning of all chats
    with the same tools and system messages, where it is requested."""

    text: str
    user_spans: tuple[tuple[int, int], ...] = ()
    harmless: str | None = None
    opening: str = ""


class ControlTokens:
    """The control tokens of a tokenizer: special ones, those that the chat template writes, those that the processor replaces by
    media, and those in the form of one. Whitespace never is. tokenizer: transformers' own. processor: the tokenizer again where
    there is none. A token that users wrote is cut after its first character. The template is rendered once more with stand-ins for
    users' characters, which shows where they are; a prompt without such a token is tokenized as transformers does it."""

    def __init__(self, tokenizer: Tokenizer, processor: object, chat_template: str) -> None:
        self._tokenizer = tokenizer
        unknown = getattr(tokenizer, "unk_token_id", None)
        media = {value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)}
        tokens = dict(tokenizer.added_tokens_decoder)
        chosen = {
            token_id: token for token_id, token in tokens.items()
            if token.content.strip() and (
                token.special or token.content in media or _CONTROL_FORM.fullmatch(token.content)
                or (token.content in chat_template and not token.content.isalnum())
            )
        }  # fmt: skip
        self.strings = frozenset({token.content for token in chosen.values()} | {text for text in media if text.strip()})
        self.ids = frozenset(chosen) - {unknown}
        self._lengths: dict[str, tuple[int, ...]] = {}
        for first in {text[0] for text in self.strings}:
            lengths = {len(text) for text in self.strings if text[0] == first}
            self._lengths[first] = tuple(sorted(lengths, reverse=True))
        self._starts = re.compile("[" + "".join(map(re.escape, sorted(self._lengths))) + "]") if self.strings else None
        signs = {char for text in self.strings for char in _signs(text)}
        self._signs = "".join(sorted(signs))
        # A token that is searched for after normalization may come from characters that look like it.
        self._is_normalized = any(token.normalized for token in chosen.values())
        # Texts for a cut: always read as a token, and removed from the ids again.
        ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "sep", "cls")}
        separators = [
            (token_id in ends, token_id, token.content) for token_id, token in chosen.items()
            if token.special and token_id != unknown and token.content not in media
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        ]  # fmt: skip
        self._separators = [(token_id, content) for _, token_id, content in sorted(separators)]

    def matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every control token in a text, the longest at each start; they may overlap."""
        for match in () if self._starts is None else self._starts.finditer(text):
            start = match.start()
            for length in self._lengths[text[start]]:
                if text[start : start + length] in self.strings:
                    yield start, start + length
                    break

    def _written(self, text: str) -> list[str]:
        """Return the control tokens of a text in their order, as a tokenizer reads them."""
        read, end = [], 0
        for start, stop in self.matches(text):
            if start >= end:
                read.append(text[start:stop])
                end = stop
        return read

    def in_opening(self, prompt: PromptText) -> list[tuple[int, int]]:
        """Return (end, token id) of each control token in the opening of a prompt, but for those that users wrote."""
        found, last, of_users = list[tuple[int, int]](), 0, set(prompt.user_spans)
        for start, end in self.matches(prompt.opening):
            if start >= last:
                last = end
                if (start, end) not in of_users:
                    found.append((end, self._tokenizer.convert_tokens_to_ids(prompt.opening[start:end])))
        return found

    # Rendering --------------------------------------------------------------------------------------------------------

    def render(
        self, render: Callable[..., str], messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> PromptText:
        """Return the rendered template, with the control tokens that came from the texts of the messages.

        render: the template, called with the messages, and with the tools if there are any. Errors: those of `render`;
        RequestError for texts that contain every private character.
        """

        def changed(change: Callable[[str], str]) -> str:
            given = (_mapped(messages, change), map_texts(tools, change, keys=True)) if tools else (_mapped(messages, change),)
            return render(*given)

        raw = changed(str)
        harmless = changed(lambda text: _NO_LETTER.sub("x", text)) if self._is_normalized else None
        texts = [*_texts(messages), *_strings(tools)]
        if not any(sign in text for text in texts for sign in self._signs):
            return PromptText(raw, (), harmless)
        stand_ins = _unused(texts, len(self._signs) + 2)
        hidden = dict(zip(map(ord, self._signs), stand_ins, strict=False))
        originals = {ord(stand_in): chr(code) for code, stand_in in hidden.items()}
        marked = changed(lambda text: text.translate(hidden))
        plain = marked.translate(originals)
        if plain != raw:
            # The template reads control tokens in the texts, as those do that leave an old answer's thoughts out, or writes
            # users' text in another form, as JSON's quotes.
            is_user = self._read_by_template(changed, raw, stand_ins[-2:])
            spans = [] if is_user is None else [span for span in self.matches(raw) if any(is_user[slice(*span)])]
            if is_user is not None and self._written(_without(raw, spans)) == self._written(marked):
                return PromptText(raw, tuple(spans), harmless)
        of_user = set(stand_ins)
        spans = [(start, end) for start, end in self.matches(plain) if of_user & set(marked[start:end])]
        return PromptText(plain, tuple(spans), harmless)

    def _read_by_template(
        self, changed: Callable[[Callable[[str], str]], str], raw: str, marks: Sequence[str]
    ) -> list[bool] | None:
        """Return for each character of the prompt whether it is of a control token that a user wrote, with the tokens left
        visible to the template; None if that is unknown."""
        first, last = marks

        def mark(text: str) -> str:
            out, end = [], 0
            for start, stop in self.matches(text):
                if start >= end:
                    out += [text[end:start], first, text[start:stop], last]
                    end = stop
            return "".join([*out, text[end:]])

        flags, inside = [], False
        marked = changed(mark)
        for char in marked:
            if char in marks:
                inside = char == first
            elif not char.isspace():
                flags.append(inside)
        # Marks may keep a template from trimming whitespace next to them.
        solid = [place for place, char in enumerate(raw) if not char.isspace()]
        unmarked = marked.replace(first, "").replace(last, "")
        if "".join(raw.split()) != "".join(unmarked.split()) or len(solid) != len(flags):
            return None
        is_user = [False] * len(raw)
        for place, flag in zip(solid, flags, strict=True):
            is_user[place] = flag
        return is_user

    # Encoding ---------------------------------------------------------------------------------------------------------

    def encode(self, encode: Callable[[str], Encoded], prompt: PromptText, *, adds_special: bool) -> Encoded:
        """Return the encoding of a prompt in which users' control tokens are text.

        encode: the tokenizer or processor, one row of tensors. adds_special: whether it adds tokens at the ends. Errors:
        RequestError if the tokenizer has no way to write such a text.
        """
        if not prompt.user_spans and not self._is_normalized:
            return encode(prompt.text)

        def counts(text: str) -> Counter[int]:
            ids = self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]
            return Counter(token_id for token_id in ids if token_id in self.ids)

        harmless = _without(prompt.text, prompt.user_spans) if prompt.harmless is None else prompt.harmless
        expected = counts(harmless)
        if not prompt.user_spans:
            if counts(prompt.text) != expected:
                raise _cannot_be_text(self._written(prompt.text))
            return encode(prompt.text)
        cuts = sorted({start + 1 for start, end in prompt.user_spans if end - start > 1})
        for separator_id, separator in self._separators:
            text, is_ours = _cut(prompt.text, cuts, separator)
            if counts(text) == expected + Counter({separator_id: len(cuts)}) and len(is_ours) == (
                expected[separator_id] + len(cuts)
            ):
                return _without_ids(encode(text), separator_id, is_ours)
        raise _cannot_be_text([prompt.text[start:end] for start, end in prompt.user_spans])


def tokenizer_of(processor: Processor) -> Tokenizer:
    """Return a processor's tokenizer, or the tokenizer that it is."""
    return processor.tokenizer if hasattr(processor, "tokenizer") else processor


class HasContext(Protocol):
    """A model with a planned context."""

    @property
    def context_tokens(self) -> int: ...


class ChatModel(PlacedModel, Protocol):
    """A model as its prompts see it. processor: its tokenizer if it only reads. processor_folder: where the files of both are."""

    @property
    def processor(self) -> Processor: ...

    @property
    def processor_folder(self) -> Path: ...

    @property
    def control_tokens(self) -> ControlTokens: ...


def _signs(text: str) -> str:
    """Return the characters by which a control token is known: those that are no letters, all if it has none such."""
    signs = "".join(char for char in text if not char.isalnum() and not char.isspace())
    return signs or text


# Fields of a user's text in a message, other than its content.
_USER_KEYS: tuple[Literal["name", "tool_calls", "tool_call_id", "reasoning_content"], ...] = (
    "name", "tool_calls", "tool_call_id", "reasoning_content",
)  # fmt: skip


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for key in _USER_KEYS:
            yield from _strings(message.get(key))
        if isinstance(message["content"], str):
            yield message["content"]
        else:
            yield from (part["text"] for part in message["content"] if part["type"] == "text")


def _strings(value: object) -> Iterator[str]:
    """Yield every text of plain values, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(messages: Sequence[Message], change: Callable[[str], str]) -> list[dict[str, object]]:
    """Return the messages with every text changed."""
    changed: list[dict[str, object]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = change(content)
        else:
            content = [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
        beside: dict[str, object] = {key: map_texts(message[key], change, keys=True) for key in _USER_KEYS if key in message}
        if "tool_calls" in beside:  # names of fields that templates look up are ours
            beside["tool_calls"] = [_changed_call(call, change) for call in message["tool_calls"]]
        changed.append({**message, "content": content, **beside})
    return changed


def _changed_call(call: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, object]:
    function = call["function"]
    fields = {"name": change(function["name"]), "arguments": map_texts(function["arguments"], change, keys=True)}
    return {**call, **({"id": change(call["id"])} if "id" in call else {}), "function": {**function, **fields}}


def _unused(texts: Sequence[str], count: int) -> list[str]:
    """Return characters that no text holds. Errors: RequestError if there are too few."""
    used = {char for text in texts for char in text if ord(char) >= _PRIVATE.start}
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    characters = [char for char, _ in zip(free, range(count), strict=False)]
    if len(characters) < count:
        raise RequestError("contains every private-use character of Unicode", field="prompt")
    return characters


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return a text with letters in place of some spans."""
    characters = list(text)
    for start, end in spans:
        characters[start:end] = "x" * (end - start)
    return "".join(characters)


def _cut(text: str, cuts: Sequence[int], separator: str) -> tuple[str, list[bool]]:
    """Return a text with a separator at every cut, and for each separator in it whether it is one of these."""
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    is_ours: list[bool] = []
    for number, piece in enumerate(pieces):
        is_ours += [True] * (number > 0) + [False] * piece.count(separator)
    return separator.join(pieces), is_ours


def _without_ids(encoded: Encoded, separator_id: int, is_ours: Sequence[bool]) -> Encoded:
    """Return an encoding of one row without the separators that are ours. Errors: RequestError if it has others."""
    ids = encoded["input_ids"]
    positions = (ids[0] == separator_id).nonzero()[:, 0].tolist()
    if len(positions) != len(is_ours):
        raise _cannot_be_text([])
    keep = torch.ones(ids.shape[1], dtype=torch.bool)
    for position, ours in zip(positions, is_ours, strict=True):
        keep[position] = not ours
    for name in _PER_TOKEN:
        if name in encoded:
            encoded[name] = encoded[name][:, keep]
    return encoded


def _cannot_be_text(tokens: Sequence[str]) -> RequestError:
    examples = sorted(set(tokens))[:3]
    return RequestError(
        f"contains a control token of this model ({', '.join(examples)}), which its tokenizer cannot read as text" if examples
        else "contains a control token of this model, which its tokenizer cannot read as text",
        field="prompt", hint="Leave it out",
    )  # fmt: skip


def turns_of(token_ids: Sequence[int], control_ids: Set[int]) -> tuple[int, ...]:
    """Return how many tokens there are up to each control token, itself included: turns, system prompts and tools end there."""
    return tuple(place + 1 for place, token in enumerate(token_ids) if token in control_ids)


# A private character that no template changes.
_ANSWER = "\U0010fffc"


class TurnEnd(NamedTuple):
    """A control token: its id and its text."""

    token_id: int
    text: str


def end_token_ids(hf_model: HFModel) -> tuple[int, ...]:
    """Return every token id that ends an answer, from the generation config or else the model's config."""
    ids = getattr(getattr(hf_model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(hf_model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def turn_end(model: ChatModel) -> TurnEnd | None:
    """Return the control token that the template writes first behind an answer; None without a template or such a token."""
    processor = model.processor
    tokenizer = tokenizer_of(processor)
    owner = processor if getattr(processor, "chat_template", None) else tokenizer
    if not getattr(owner, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
    for form in (parts, chat):
        try:
            _, mark, behind = render(owner, form, model.processor_folder).rpartition(_ANSWER)
        except (*REFUSALS, CheckpointError):
            continue
        start, end = next(iter(model.control_tokens.matches(behind)), (0, 0))
        if mark and end and not behind[:start].strip():
            return TurnEnd(int(tokenizer.convert_tokens_to_ids(behind[start:end])), behind[start:end])
    return None


def missing_turn_end(model: ChatModel) -> TurnEnd | None:
    """Return the token that ends a turn, if no list of the checkpoint has it: then answers do not end there."""
    found = turn_end(model)
    return found if found is not None and found.token_id not in end_token_ids(model.hf_model) else None


def stop_at_turn_end(model: ChatModel, *, is_asked: bool | None = None) -> TurnEnd | None:
    """Let answers of a loaded model end where its chat template ends a turn, also if the checkpoint's lists do not say so.

    is_asked: None ends them there if the tokenizer's own end token is that token, False never. Returns the token at which answers
    go on without a request for it. Call it before a batch is made: a batch keeps the end tokens. `trimtab run`, `chat` and `serve`
    do so where the tokenizer's end token is the template's, as vLLM (v1/core/sched/utils.py, check_stop). transformers' `generate`
    goes on.
    """
    missing = None if is_asked is False else missing_turn_end(model)
    if missing is None:
        return None
    if is_asked or missing.token_id == tokenizer_of(model.processor).eos_token_id:
        model.hf_model.generation_config.eos_token_id = [*end_token_ids(model.hf_model), missing.token_id]
        return None
    return missing


def going_on(missing: TurnEnd, remedy: str) -> str:
    """Return the message about a token at which answers go on. remedy: the option that ends them there."""
    return (
        f"the chat template ends turns with {missing.text}, which is not among the checkpoint's end tokens: answers may run to "
        f"the token limit. {remedy} ends them there"
    )
