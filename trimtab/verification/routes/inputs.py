"""How do prompts become model inputs once, for all routes?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from trimtab.checkpoint.folder import read_checkpoint
from trimtab.errors import RequestError
from trimtab.request import MAX_SOUND_S
from trimtab.verification.routes.prompts import Prompt

if TYPE_CHECKING:
    from trimtab.planning import Plan


class WithoutWeights:
    """A stand-in for a model, with the attributes that `prompt.prepare` reads. plan: None counts no memory of media."""

    def __init__(self, folder: Path, dtype: str, plan: Plan | None = None) -> None:
        from trimtab.engine.loader import transformers_model

        self.processor_folder = folder
        self.device, self.dtype = torch.device("cpu"), getattr(torch, dtype)
        self.hf_model: Any = SimpleNamespace(config=transformers_model.read_config(read_checkpoint(folder)))
        self.text_config = self.hf_model.config.get_text_config()
        self.plan: Any = plan or SimpleNamespace(request=SimpleNamespace(images=10**6, audio_s=MAX_SOUND_S))

    @cached_property
    def processor(self) -> Any:
        from trimtab.engine.loader.processor import load_processor

        return load_processor(self.processor_folder)

    @cached_property
    def control_tokens(self) -> Any:
        from trimtab.engine.chat import prompt

        return prompt.control_tokens(self.processor)


def file_of(out: Path, place: int) -> Path:
    """Return the file of a prompt's inputs in a folder."""
    return out / f"inputs-{place}.safetensors"


def prepare(model: Path, dtype: str, prompts: Sequence[Prompt], out: Path) -> list[dict[str, Any]]:
    """Write the inputs of every prompt into `out` and return one row per prompt: id, file, prompt_tokens, has_media.

    Errors: RequestError that lists all prompts that the model's processor refuses; CheckpointError if the folder has no
    processor for them.
    """
    asked = [
        (one.id, list(one.token_ids) or one.text, [one.image] if one.image else [], [one.audio] if one.audio else [])
        for one in prompts
    ]
    return write(WithoutWeights(model, dtype), asked, out)  # the routes' plans are made for these prompts


def write(
    stand_in: WithoutWeights, asked: Sequence[tuple[str, Any, list[str], list[str]]], out: Path,
    check: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Do the same for (id, question, images, audio clips). check: raises RequestError for inputs that are too long."""
    from trimtab.engine.chat import prompt

    rows, problems = [], []
    for place, (name, question, images, audios) in enumerate(asked):
        try:
            inputs = prompt.prepare(stand_in, question, images=images, audios=audios)
            if check is not None:
                check(inputs)
        except RequestError as exc:
            problems.append(f"{name}: {exc}")
            continue
        file = file_of(out, place)
        save_file({name: tensor.contiguous() for name, tensor in inputs.tensors.items()}, str(file))
        rows.append({"id": name, "file": str(file), "prompt_tokens": inputs.prompt_tokens, "has_media": inputs.has_media})
    if problems:
        raise RequestError("\n  - ".join([f"{len(problems)} refused", *problems]), field="prompts")
    return rows


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Run `prepare` in a separate process; emit the rows and return them."""
    prompts = [Prompt(**{**row, "token_ids": tuple(row.get("token_ids", ()))}) for row in request["prompts"]]
    rows = prepare(Path(request["model"]), request["dtype"], prompts, Path(request["out"]))
    emit({"event": "prepared", "rows": rows})
    return rows
