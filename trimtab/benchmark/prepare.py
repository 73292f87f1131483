"""Which inputs do both engines of a benchmark get: the plan, the prompts, and the bytes read per token?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.api import plan_request
from trimtab.benchmark.roofline import step_reads
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.config_limits import experts_per_token
from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.media import SAMPLE_RATE, read_audio, read_image
from trimtab.engine.loader import transformers_model
from trimtab.errors import CheckpointError
from trimtab.planning import Plan
from trimtab.request import LoadRequest
from trimtab.verification.routes.inputs import WithoutWeights, write
from trimtab.verification.routes.prompts import TOKENIZERS, Prompt, random_tokens

PROMPT_TOKENS = 512
SEED = 0
MEDIA_QUESTION = "Describe what you are given."
# Repeated until the prompt is long enough: the text does not change the time.
TEXT = (
    "A model that does not fit the memory of a card is split: some of its blocks stay there, others wait in the memory of "
    "the host and are copied when their turn comes. Each token that is written needs every block once, so what has to "
    "be copied for a token decides how long the token takes. "
)


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Plan, and write every prompt's inputs into the folder `out`.

    request: plan or request (JSON of either), adapter, prompts (rows of Prompt, or None for one made here), images,
    audios, prompt_tokens (None: PROMPT_TOKENS), new_tokens, out. Emits "prepared": plan, folder, items, context_tokens
    (of the cache, on average over the answers), reads (of each engine).
    Errors: those of planning; RequestError for a prompt that the model refuses or that does not fit the context.
    """
    given = [Prompt(**{**row, "token_ids": tuple(row.get("token_ids", ()))}) for row in request["prompts"] or ()]
    media = _media(request, given)
    plan = Plan.from_json(request["plan"]) if request.get("plan") else _plan(request["request"], media)
    checkpoint = read_checkpoint(plan.request.model)
    stand_in = WithoutWeights(checkpoint.folder, plan.request.dtype, plan)
    if given:
        questions = [(prompt.id, list(prompt.token_ids) or prompt.text) for prompt in given]
    elif media[0][0] or media[0][1]:
        questions = [("media", MEDIA_QUESTION)]
    else:
        questions = [("text", _tokens(stand_in, request["prompt_tokens"] or PROMPT_TOKENS))]
    asked = [(*question, *files) for question, files in zip(questions, media, strict=True)]
    check = partial(chat.check_fits, plan.request, max_new_tokens=request["new_tokens"])
    items = write(stand_in, asked, Path(request["out"]), check)
    context = sum(item["prompt_tokens"] for item in items) / len(items) + request["new_tokens"] / 2
    emit(
        {"event": "prepared", "plan": plan.to_json(), "folder": str(checkpoint.folder), "items": items,
         "context_tokens": context, "reads": _reads(plan, checkpoint, stand_in, request["adapter"], context)}
    )  # fmt: skip


def _media(request: Mapping[str, Any], given: Sequence[Prompt]) -> list[tuple[list[str], list[str]]]:
    """Return (images, audio clips) of each prompt, all of them readable."""
    if not given:
        pairs = [(list(request["images"]), list(request["audios"]))]
    else:
        pairs = [([p.image] if p.image else [], [p.audio] if p.audio else []) for p in given]
    for images, _ in pairs:
        for image in images:
            read_image(image)
    return pairs


def _plan(values: Mapping[str, Any], media: Sequence[tuple[list[str], list[str]]]) -> Plan:
    """Return the plan of a request with as many images and as much audio as the prompts have."""
    sound_s = max(sum(len(read_audio(audio)) for audio in audios) / SAMPLE_RATE for _, audios in media)
    images = max(len(images) for images, _ in media)
    return plan_request(replace(LoadRequest.from_json(values), images=images, audio_s=sound_s))


def _tokens(stand_in: WithoutWeights, count: int) -> list[int]:
    """Return a prompt of exactly this many tokens: from a text with a tokenizer, else random."""
    if any((stand_in.processor_folder / name).is_file() for name in TOKENIZERS):
        try:
            tokenizer = getattr(stand_in.processor, "tokenizer", stand_in.processor)
        except CheckpointError:
            tokenizer = None
        if tokenizer is not None:
            once = len(tokenizer(TEXT)["input_ids"])
            return [int(token) for token in tokenizer(TEXT * (count // max(once - 2, 1) + 2))["input_ids"][:count]]
    return random_tokens(int(stand_in.text_config.vocab_size), count, SEED)


def _reads(
    plan: Plan, checkpoint: Checkpoint, stand_in: WithoutWeights, adapter: str | None, context: float
) -> dict[str, list[dict[str, Any]]]:
    anatomy = _anatomy(plan, checkpoint, plan.request.head)
    # The stock stack has no 8-bit head.
    theirs = anatomy if plan.request.head == "full" else _anatomy(plan, checkpoint, "full")
    spec = None if adapter is None else match_adapter(read_adapter(plan.request.adapters[adapter]), anatomy)
    experts = experts_per_token(stand_in.text_config) or None
    options: dict[str, Any] = {"context_tokens": context, "adapter": spec, "experts_per_token": experts}
    by_engine = {"trimtab": step_reads(plan, anatomy, **options), "stock": step_reads(plan, theirs, is_stock=True, **options)}
    return {name: [asdict(read) for read in reads] for name, reads in by_engine.items()}


def _anatomy(plan: Plan, checkpoint: Checkpoint, head: str) -> Anatomy:
    request = plan.request
    probe = plan.files_read.look(plan.made_of).tree
    if probe is None:
        probe = transformers_model.probe(checkpoint, request.dtype)
    return transformers_model.anatomy_of(
        probe, checkpoint, quant=request.quant, keep_unquantized=request.keep_unquantized, head=head, experts=request.experts
    )
