"""A prompt becomes model inputs: the chat template, and images and audio through the model's own processor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from trimtab.engine.chat.answer_forms import AnswerForm, form_of
from trimtab.engine.chat.control_tokens import ChatModel, ControlTokens, HasContext, PromptText, tokenizer_of, turns_of
from trimtab.engine.chat.marks import marks_of, opening_of, picture_digest, sound_digest
from trimtab.engine.chat.media import SAMPLE_RATE, LowDetail, read_audio, read_image
from trimtab.engine.chat.media_check import check_frames, check_pictures, check_sound_lengths, check_taken, check_tower
from trimtab.engine.kv.sequence import Inputs, check_words, media_ids, placeholder_ids
from trimtab.engine.loader.processor import TOKENIZER_HINT
from trimtab.engine.templates.budget import REFUSALS
from trimtab.engine.templates.budget import render as render_template
from trimtab.engine.templates.costs import MAX_TEMPLATE_CHARS
from trimtab.errors import CheckpointError, RequestError
from trimtab.request import OPENAI_TYPES, GenerateRequest, Message, Part, empty_place, own_form, parts_in, texts_in

if TYPE_CHECKING:
    from PIL import Image

    from trimtab.engine.formats.hf_types import ChatTemplateOwner, FeatureExtractor, Processor, Tokenizer

T = TypeVar("T")
ROLES = ("system", "user", "assistant", "developer", "tool")
PART_TYPES = ("text", "image", "audio")
# Fields of a message in addition to its role and content, for the templates that write them.
MESSAGE_KEYS: tuple[Literal["name", "tool_calls", "tool_call_id", "reasoning_content"], ...] = (
    "name", "tool_calls", "tool_call_id", "reasoning_content",
)  # fmt: skip
# The beginning of hints that only the author of the plan can follow.
PLAN_HINT = "Plan with "
CONTEXT_HINT = "Shorten the prompt, lower max_new_tokens, or plan with a larger context="


def prepare(
    model: ChatModel, prompt: object, *, images: Sequence[object] = (), audios: Sequence[object] = (), system: str | None = None,
    template_kwargs: Mapping[str, object] | None = None, tools: Sequence[Mapping[str, object]] = (),
    device: torch.device | None = None, continue_final_message: bool = False,
) -> Inputs:  # fmt: skip
    """Return the inputs of one prompt: text, chat messages with parts in their order, or token ids taken as they are.

    A text with images and audio becomes one user message: images, text, audio clips, the order that Gemma 4's processor
    documents. Where the checkpoint has a chat template, nothing in a text becomes a control token: `<|turn>` is read as the
    characters it is written with. Without one, a text is the prompt itself, with control tokens as they are.
    tools: functions that the model may call, in OpenAI's form; the arguments of calls in messages are objects. device: where the
    tensors are put, None is the model's. continue_final_message: the prompt ends with the text of the last message, an assistant's,
    and the answer continues it.
    Errors: RequestError for a modality that the model lacks, a medium that cannot be read, a message of no
    known form, no prompt at all (empty text, or an empty last message of a user); CheckpointError if the folder has no processor.
    """
    if is_token_ids(prompt):
        if images or audios or system or template_kwargs or tools or continue_final_message:
            raise RequestError("token ids are used unchanged; media, system, tools and template do not apply", field="prompt")
        return _from_ids(model, prompt, device)
    if isinstance(prompt, str) and not (prompt.strip() or images or audios):
        raise RequestError("is empty", field="prompt")
    messages, pictures, sounds = _messages(prompt, images, audios, system)
    if not isinstance(prompt, str) and (place := empty_place(messages)) is not None:
        raise RequestError(f"message {place} is empty", field="prompt")
    if continue_final_message:
        _check_continues(messages[-1])
    _check_modalities(model, pictures, sounds)
    _check_planned(model, "image", len(pictures), "images", "images")
    processor, device = model.processor, device or model.device
    if not (pictures or sounds) and not hasattr(processor, "tokenizer"):
        return _by_tokenizer(model, processor, messages, prompt, system, template_kwargs, tools, device, continue_final_message)
    return _by_processor(
        model, processor, messages, pictures, sounds, prompt, system, template_kwargs, tools, device,
        continue_final_message,
    )  # fmt: skip


def decode_media(model: ChatModel, messages: Sequence[object], *, audio_s: float | None = None) -> list[Message]:
    """Return chat messages with their images and audio decoded: Pillow images, samples at 16 kHz. Needs no tokenizer.

    audio_s: most seconds of all audio together, where that is less than planned. Errors: as `prepare` for media; RequestError for
    more audio than that.
    """
    checked, pictures, sounds = _messages(messages, (), (), None)
    _check_modalities(model, pictures, sounds)
    _check_planned(model, "image", len(pictures), "images", "images")
    feature = getattr(model.processor, "feature_extractor", None)
    if sounds and feature is None:
        raise CheckpointError("its processor has no feature extractor for audio", path=model.processor_folder)
    decoded: Mapping[str, Iterator[object]] = {
        "image": iter([_numbered(number, read_image, picture) for number, picture in enumerate(pictures)]),
        "audio": iter(_read_sounds(model, feature, sounds, most_s=audio_s)),
    }
    for message in checked:
        message["content"] = [_with_medium(part, decoded) for part in parts_in(message)]
    return checked


def _with_medium(part: Part, decoded: Mapping[str, Iterator[object]]) -> Part:
    if part["type"] == "image":
        return {**part, "image": next(decoded["image"])}
    return {**part, "audio": next(decoded["audio"])} if part["type"] == "audio" else part


def check_fits(model: HasContext, inputs: Inputs, max_new_tokens: int) -> None:
    """Raise RequestError if prompt and answer are longer than the context that was planned."""
    if inputs.prompt_tokens + max_new_tokens > model.context_tokens:
        answer = f" and the answer may have {max_new_tokens}, together" if max_new_tokens else ","
        raise RequestError(
            f"the prompt has {inputs.prompt_tokens} tokens{answer} more than the context of {model.context_tokens}",
            field="prompt", hint=CONTEXT_HINT,
        )  # fmt: skip


def fitted(model: HasContext, inputs: Inputs, request: GenerateRequest) -> GenerateRequest:
    """Return the request with max_new_tokens as a number. Errors: RequestError if prompt and answer do not fit the context."""
    request = request.within(model.context_tokens - inputs.prompt_tokens)
    check_fits(model, inputs, request.answer_tokens)
    return request


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is a list of token ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompt
    )  # fmt: skip


def _from_ids(model: ChatModel, ids: Sequence[int], device: torch.device | None) -> Inputs:
    vocabulary = int(model.hf_model.config.get_text_config().vocab_size)
    if not all(0 <= token < vocabulary for token in ids):
        raise RequestError(f"token ids must be between 0 and {vocabulary - 1}", field="prompt")
    check_words(model.hf_model, ids)
    tensor = torch.tensor([list(ids)], device=device or model.device)
    return Inputs({"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}, len(ids), tuple(ids), has_media=False)


def _messages(
    prompt: object, images: Sequence[object], audios: Sequence[object], system: str | None
) -> tuple[list[Message], list[object], list[object]]:
    if isinstance(prompt, str):
        parts: list[object] = [{"type": "image", "image": image} for image in images]
        parts += [{"type": "text", "text": prompt}] + [{"type": "audio", "audio": audio} for audio in audios]
        raw: list[object] = [{"role": "user", "content": parts}]
    elif isinstance(prompt, (list, tuple)) and prompt:
        if images or audios:
            raise RequestError("chat messages carry their own media parts", field="image" if images else "audio")
        raw = list(prompt)
    else:
        raise RequestError("is not text, chat messages or token ids", field="prompt", value=type(prompt).__name__)
    if system is not None:
        if raw and isinstance(raw[0], Mapping) and raw[0].get("role") == "system":
            raise RequestError("the messages already have a system message", field="system")
        raw.insert(0, {"role": "system", "content": system})
    pictures: list[object] = []
    sounds: list[object] = []
    return [_message(place, item, pictures, sounds) for place, item in enumerate(raw)], pictures, sounds


def _message(place: int, item: object, pictures: list[object], sounds: list[object]) -> Message:
    if not isinstance(item, Mapping) or item.get("role") not in ROLES:
        raise RequestError(f"message {place} has no known role", field="prompt", allowed=ROLES)
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        content = ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)):
        raise RequestError(f"message {place} has no content", field="prompt")
    described: list[Part] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in OPENAI_TYPES and kind in part:
            part = own_form(part)
            kind = part["type"]
        if kind not in PART_TYPES or kind not in part:
            raise RequestError(f"message {place} has a part of unknown form {kind!r}", field="prompt", allowed=PART_TYPES)
        if kind == "text":
            described.append({"type": "text", "text": _text(part["text"])})
            continue
        medium = LowDetail(part[kind]) if kind == "image" and part.get("detail") == "low" else part[kind]
        (pictures if kind == "image" else sounds).append(medium)
        described.append({"type": kind})
    message: Message = {"role": item["role"], "content": described}
    for key in MESSAGE_KEYS:
        if item.get(key):
            message[key] = item[key]
    return message


def _text(value: object) -> str:
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError("contains half of a surrogate pair, which is not a character", field="prompt") from exc
    return text


def answer_form(processor: ChatTemplateOwner, *, with_tools: bool = False) -> AnswerForm:
    """Return how a checkpoint's answers write calls and thoughts. with_tools: with the template for tools, if there are several."""
    template = _template(processor, getattr(processor, "tokenizer", processor))
    if isinstance(template, Mapping):
        template = template.get("tool_use" if with_tools and "tool_use" in template else "default")
    return form_of(template) if isinstance(template, str) else AnswerForm()


def control_tokens(processor: Processor) -> ControlTokens:
    """Return the tokens of a checkpoint that no text may become."""
    tokenizer = tokenizer_of(processor)
    return ControlTokens(tokenizer, processor, str(_template(processor, tokenizer))[:MAX_TEMPLATE_CHARS])


def _template(processor: object, tokenizer: object) -> object:
    return getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)


def _check_modalities(model: ChatModel, pictures: list[object], sounds: list[object]) -> None:
    config = model.hf_model.config
    present = [name for name in getattr(config, "sub_configs", None) or {} if getattr(config, name, None) is not None]
    known = [kind for kind, word in (("image", "vision"), ("audio", "audio")) if any(word in name for name in present)]
    for kind, given in (("image", pictures), ("audio", sounds)):
        if given and kind not in known:
            raise RequestError(f"this model takes {', '.join(('text', *known))}", field=kind, hint=f"Omit the {kind}")


def _check_planned(model: ChatModel, field: str, count: float, planned: str, what: str) -> None:
    """Raise RequestError if a prompt has more media than the memory that was counted for them."""
    limit = getattr(model.plan.request, planned)
    if count > limit:
        raise RequestError(
            f"the prompt has {count:g} {what}, the limit is {limit:g}", field=field,
            hint=f"{PLAN_HINT}{planned}={count:g}",
        )  # fmt: skip


def _joined(messages: list[Message]) -> list[Message]:
    """Return messages with plain text contents, the form of text-only templates."""
    return [{**message, "content": "".join(texts_in(message))} for message in messages]


def _check_continues(message: Message) -> None:
    """Raise RequestError for a last message without a text that an answer can continue."""
    parts = parts_in(message)
    ends_in_text = bool(parts) and parts[-1]["type"] == "text" and bool(parts[-1]["text"].strip())
    if message["role"] != "assistant" or message.get("tool_calls") or not ends_in_text:
        raise RequestError("continues the text of an assistant's last message, and there is none", field="continue_final_message")


# Marks where the continued text ends. A private character beyond the stand-ins (control_tokens.py): a template
# that trims texts does not trim it.
_END = "\U0010fffd"


def _with_end(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return messages with _END after the last one's text, and that text."""
    *earlier, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*earlier, {**last, "content": content + _END}], content
    text = content[-1]["text"]
    return [*earlier, {**last, "content": [*content[:-1], {**content[-1], "text": text + _END}]}], text


def _up_to_end(rendered: str, text: str) -> str:
    """Return a rendered chat up to the end of its last text. Source: transformers'
    `apply_chat_template(continue_final_message=True)`, which also takes white space off the end. Errors: ValueError if the
    template changed that text."""
    head, mark, _ = rendered.rpartition(_END)
    if not mark or not head.endswith(text.lstrip()):
        raise ValueError("it changes the text of the final message")
    return head


def _rendered(
    model: ChatModel, owner: ChatTemplateOwner, forms: Sequence[list[Message]], template_kwargs: Mapping[str, object] | None,
    tools: Sequence[Mapping[str, object]], continue_final_message: bool,
) -> PromptText:  # fmt: skip
    """Return the rendered messages. forms: the same messages; the first one that the template writes counts."""
    if tools and "tools" not in answer_form(owner, with_tools=True).reads:
        raise RequestError("not supported: tools (the checkpoint's chat template has no tools)", field="tools")

    def render(changed: Sequence[Message], changed_tools: Sequence[Mapping[str, object]] = ()) -> str:
        options = dict(template_kwargs or {})
        if changed_tools:
            options["tools"] = list(changed_tools)
        if not continue_final_message:
            return render_template(owner, changed, folder, add_generation_prompt=True, **options)
        marked, text = _with_end(changed)
        return _up_to_end(render_template(owner, marked, folder, **options), text)

    folder = model.processor_folder
    if "[TOOL_CALLS]" in str(owner.chat_template):
        forms = [_with_short_ids(form) for form in forms]
    problem: Exception | None = None
    for form in forms:
        try:
            prompt: PromptText = model.control_tokens.render(render, form, tools)
            is_listed = any(isinstance(message["content"], list) for message in form)
            if is_listed and _LIST.search(render(_neutral(form))):
                raise ValueError("it writes a list of parts where text belongs")
            if any("name" in message for message in form if message["role"] != "tool"):
                _check_names(render, form, tools)
            _check_written(render, form, tools, prompt.text)
        except (*REFUSALS, RequestError) as exc:
            problem = exc if isinstance(exc, RequestError) else problem or exc
        else:
            return replace(prompt, opening=_opening(model, render, form, tools, prompt.text))
    if isinstance(problem, RequestError):
        raise problem
    raise RequestError(f"the chat template refuses these messages ({problem})", field="prompt") from problem


def _opening(
    model: ChatModel, render: Callable[..., str], messages: Sequence[Message], tools: Sequence[Mapping[str, object]], text: str
) -> str:  # fmt: skip
    """Return the common beginning of the rendered prompts of all chats with its tools and first system messages; "" where no prefix
    cache needs it, or there are none."""
    cache = getattr(model, "prefix_cache", None)
    first = list(takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    if cache is None or not cache.windows or not (first or tools):
        return ""
    is_listed = any(isinstance(message["content"], list) for message in messages)
    question = {"role": "user", "content": [{"type": "text", "text": _END}] if is_listed else _END}
    try:
        other = render([*first, question], *([tools] if tools else []))
    except (*REFUSALS, CheckpointError):
        return ""  # a template that wants more than one question has no known opening
    opening, mark, _ = other.partition(_END)
    return opening if mark and text.startswith(opening) else ""


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have ids of nine letters and digits: Mistral's templates refuse others."""

    def short(given: object) -> str:
        if re.fullmatch(r"[A-Za-z0-9]{9}", str(given)):
            return str(given)
        return hashlib.sha256(str(given).encode("utf-8", "replace")).hexdigest()[:9]

    shortened: list[Message] = []
    for message in messages:
        changed: Message = {**message}
        if message.get("tool_calls"):
            changed["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            changed["tool_call_id"] = short(message["tool_call_id"])
        shortened.append(changed)
    return shortened


# A part of a message in Python's and JSON's notation.
_LIST = re.compile(r"""\{["']type["']: ["']text["'], ["']text["']: """)


def _texts_plain(messages: Sequence[Message]) -> list[Message]:
    """Return the messages. Contents without media become text."""
    plain: list[Message] = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
            message = {**message, "content": "".join(part["text"] for part in parts)}
        plain.append({**message})
    return plain


def _neutral(messages: Sequence[Message]) -> list[Message]:
    """Return messages of the same form with another text."""
    neutral: list[Message] = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list):
            parts = [{**part, "text": "x"} if part.get("type") == "text" else part for part in parts]
        neutral.append({**message, "content": "x" if isinstance(parts, str) else parts})
    return neutral


def _check_names(render: Callable[..., str], messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> None:
    """Raise RequestError if the template writes no names: a client that sends one relies on it."""
    without = [{key: value for key, value in message.items() if key != "name" or message["role"] == "tool"} for message in messages]
    if render(messages, tools) == render(without, tools):
        raise RequestError("not supported: name (the checkpoint's chat template writes none)", field="name")


def _check_written(
    render: Callable[..., str], messages: Sequence[Message], tools: Sequence[Mapping[str, object]], written: str
) -> None:  # fmt: skip
    """Raise if the template does not write the last text of a user (ValueError: another form may have it), or writes a system
    message nowhere, also not in front of a question."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"][-1:]
    missing, at = [], 0
    for index, message in enumerate(messages):
        if index not in users and message["role"] not in ("system", "developer"):
            continue
        content = message["content"]
        for text in [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]:
            found = written.find(text.strip(), at)
            if found < 0 and text.strip() not in written:
                missing.append(index)
                break
            at = max(at, found)
    if not missing:
        return
    marked, wanted = [*messages], dict.fromkeys(missing, 1)
    for index in missing:
        content = messages[index]["content"]
        mark: str | list[Part] = _END
        if not isinstance(content, str):
            mark = [{**part, "text": _END} if part["type"] == "text" else part for part in content]
            wanted[index] = sum(part["type"] == "text" for part in content)
        marked[index] = {**messages[index], "content": mark}
    if render(marked, tools).count(_END) >= sum(wanted.values()):
        return  # in another form: stripped, escaped
    for index in missing:
        is_plain = isinstance(marked[index]["content"], str)
        question: Message = {"role": "user", "content": "x" if is_plain else [{"type": "text", "text": "x"}]}
        if render([marked[index], *([] if index in users else [question])], tools).count(_END) >= wanted[index]:
            continue
        if index in users:
            raise ValueError("it does not write the text of the last question")
        raise RequestError("not supported: system (the checkpoint's chat template writes no such message)", field="system")


def _by_tokenizer(
    model: ChatModel, tokenizer: Tokenizer, messages: list[Message], prompt: object, system: str | None,
    template_kwargs: Mapping[str, object] | None, tools: Sequence[Mapping[str, object]], device: torch.device,
    continue_final_message: bool,
) -> Inputs:  # fmt: skip
    if not getattr(tokenizer, "chat_template", None):
        text = _plain(prompt, system, template_kwargs, tools)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=_adds_special(tokenizer, text))
        return _inputs(model, tokenizer, encoded, device, has_media=False)

    # A template writes the first token itself, where the model knows one.
    def encode(text: str) -> MutableMapping[str, object]:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)

    # Some templates of models that see take lists of parts alone.
    rendered = _rendered(model, tokenizer, (_joined(messages), messages), template_kwargs, tools, continue_final_message)
    encoded = model.control_tokens.encode(encode, rendered, adds_special=False)
    return _inputs(model, tokenizer, encoded, device, has_media=False, rendered=rendered)


def _plain(
    prompt: object, system: str | None, template_kwargs: Mapping[str, object] | None, tools: Sequence[Mapping[str, object]]
) -> str:
    if tools:
        raise RequestError("not supported: tools (the checkpoint has no chat template)", field="tools")
    if system is not None or template_kwargs or not isinstance(prompt, str):
        field = "system" if system is not None else "prompt"
        raise RequestError("this checkpoint has no chat template: pass plain text only", field=field)
    return _text(prompt)


def _adds_special(tokenizer: Tokenizer, text: str) -> bool:
    # A template writes the first token itself; a second one would change the answer.
    return not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def _by_processor(
    model: ChatModel, processor: Processor, messages: list[Message], pictures: list[object], sounds: list[object], prompt: object,
    system: str | None, template_kwargs: Mapping[str, object] | None, tools: Sequence[Mapping[str, object]], device: torch.device,
    continue_final_message: bool,
) -> Inputs:  # fmt: skip
    tokenizer = tokenizer_of(processor)
    owner = processor if getattr(processor, "chat_template", None) else tokenizer
    if getattr(owner, "chat_template", None):
        # Such templates may take contents as lists of parts, as text alone, or each in some places.
        rendered = _rendered(model, owner, (messages, _texts_plain(messages)), template_kwargs, tools, continue_final_message)
    elif pictures or sounds:
        raise RequestError("this checkpoint has no chat template to place media in", field="prompt")
    else:
        rendered = PromptText(_plain(prompt, system, template_kwargs, tools))
    adds_special = _adds_special(tokenizer, rendered.text)
    images: list[Image.Image] = []
    audio: list[np.ndarray] = []
    options: dict[str, object] = {"add_special_tokens": adds_special}
    if pictures or sounds:
        options["return_tensors"] = "pt"
    if pictures:
        options["images"] = images = [_numbered(number, read_image, picture) for number, picture in enumerate(pictures)]
    if sounds:
        feature = getattr(processor, "feature_extractor", None)
        if feature is None:
            raise CheckpointError("its processor has no feature extractor for audio", path=model.processor_folder)
        options["audio"] = audio = _read_sounds(model, feature, sounds)

    def encode(text: str) -> MutableMapping[str, object]:
        return _tensors(processor(text=[text], **options))

    try:
        encoded = model.control_tokens.encode(encode, rendered, adds_special=adds_special)
    except (ValueError, TypeError, IndexError) as exc:
        raise RequestError(f"the model's processor refuses this prompt ({exc})", field="prompt") from exc
    has_media = bool(pictures or sounds)
    if has_media:
        check_taken(encoded, model.processor_folder)
        check_tower(model.hf_model, encoded, model.processor_folder)
        check_pictures(model.hf_model.config, encoded, images)
        check_frames(encoded, audio, SAMPLE_RATE)
    digests = ([picture_digest(picture) for picture in images], [sound_digest(samples) for samples in audio])
    return _inputs(model, tokenizer, encoded, device, has_media=has_media, digests=digests, rendered=rendered)


def _tensors(encoded: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """Return a processor's result with tensors in place of its lists of tokens: it would check every number first, while the
    thread that makes tokens waits."""
    for name, value in encoded.items():
        if isinstance(value, (list, np.ndarray)):
            encoded[name] = torch.as_tensor(value)
    return encoded


def _numbered(number: int, read: Callable[..., T], *arguments: object, **options: object) -> T:
    """Return the result of `read`. An error names the number of the medium."""
    try:
        return read(*arguments, **options)
    except RequestError as exc:
        exc.number = number
        raise


def _read_sounds(
    model: ChatModel, feature: FeatureExtractor | None, sounds: Sequence[object], *, most_s: float | None = None
) -> list[np.ndarray]:
    """Return the samples of every audio clip; no more are decoded than were planned. most_s: as `audio_s` of `decode_media`."""
    planned_s = float(model.plan.request.audio_s)
    limit_s = planned_s if most_s is None else min(most_s, planned_s)
    read: list[np.ndarray] = []
    for number, sound in enumerate(sounds):
        read.append(_numbered(number, read_audio, sound, max_s=limit_s))
        seconds = sum(len(samples) for samples in read) / SAMPLE_RATE
        _check_planned(model, "audio", seconds, "audio_s", "seconds of audio")
        if seconds > limit_s:
            raise RequestError(
                f"the audio of the prompt has {seconds:.1f} seconds, the limit of a request is {limit_s:g}", field="audio",
                hint="Send shorter or fewer clips", number=number,
            )  # fmt: skip
    check_sound_lengths(feature, read, SAMPLE_RATE)
    return read


def _inputs(
    model: ChatModel, tokenizer: Tokenizer, encoded: Mapping[str, Any], device: torch.device, *, has_media: bool,
    digests: tuple[Sequence[bytes], Sequence[bytes]] = ((), ()), rendered: PromptText | None = None,
) -> Inputs:  # fmt: skip
    tensors = {}
    for name, value in encoded.items():
        if isinstance(value, Tensor):
            # Pixels in the model's dtype: a quantized vision tower would otherwise compute in the float32 it is given.
            tensors[name] = value.to(device, model.dtype if value.is_floating_point() else None)
    ids = tuple(encoded["input_ids"][0].tolist())  # at once, and before they are on the device
    if not ids:
        raise RequestError("is empty", field="prompt")
    _check_known(model, tokenizer, ids)
    kinds = media_ids(model.hf_model)
    marks = marks_of(ids, list(zip(kinds, digests, strict=True))) if has_media else ()
    ends = model.control_tokens.ids - kinds[0] - kinds[1]
    turns, opening = turns_of(ids, ends), 0
    if rendered is not None and rendered.opening:
        controls = [one for one in model.control_tokens.in_opening(rendered) if one[1] in ends]
        encode = partial(_encoded, tokenizer)
        opening = opening_of(rendered.opening, controls, ids, turns, encode)
    return Inputs(tensors, len(ids), ids, has_media, marks, turns, opening)


def _encoded(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _check_known(model: ChatModel, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Raise CheckpointError if the embedding has no row for an id, RequestError if the tokenizer does not know the text."""
    vocabulary = int(model.hf_model.config.get_text_config().vocab_size)
    unknown = [token for token in ids if token >= vocabulary]
    if unknown and set(unknown) - placeholder_ids(model.hf_model):
        raise CheckpointError(
            f"its tokenizer made token id {max(unknown)} of this prompt, the model has {vocabulary} embedding rows",
            path=model.processor_folder, hint=TOKENIZER_HINT,
        )  # fmt: skip
    check_words(model.hf_model, ids)
    unk = getattr(tokenizer, "unk_token_id", None)
    if unk is not None and unk in ids and set(ids) <= set(tokenizer.all_special_ids):
        raise RequestError(
            f"the checkpoint's tokenizer does not know it: every token is {tokenizer.unk_token}", field="prompt",
            hint=TOKENIZER_HINT,
        )  # fmt: skip
