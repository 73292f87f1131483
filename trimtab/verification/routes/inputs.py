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
    """A stand-in for a model, with the attributes that `chat.prepare` reads. plan: None counts no memory of media."""

    def __init__(self, folder: Path, dtype: str, plan: Plan | None = None) -> None:
        from trimtab.engine.loader import transformers_model as hf

        self.processor_folder = folder
        self.device, self.dtype = torch.device("cpu"), getattr(torch, dtype)
        self.hf_model: Any = SimpleNamespace(config=hf.read_config(read_checkpoint(folder)))
        self.text_config = self.hf_model.config.get_text_config()
        self.plan: Any = plan or SimpleNamespace(request=SimpleNamespace(images=10**6, audio_s=MAX_SOUND_S))

    @cached_property
    def processor(self) -> Any:
        from trimtab.engine.loader import processor as hf_processor

        return hf_processor.load_processor(self.processor_folder)

    @cached_property
    def control_tokens(self) -> Any:
        from trimtab.engine.chat import prompt as chat

        return chat.control_tokens(self.processor)


def file_of(out: Path, place: int) -> Path:
    """Return the file of a prompt's inputs in a folder."""
    return out / f"inputs-{place}.safetensors"


def prepare(model: Path, dtype: str, prompts: Sequence[Prompt], out: Path) -> list[dict[str, Any]]:
    """Write the inputs of every prompt into `out` and return one row per prompt: id, file, prompt_tokens, has_media.

    Errors: RequestError that lists all prompts that the model's processor refuses; CheckpointError if the folder has no
    processor for them.
    """
    from trimtab.engine.chat import prompt as chat

    stand_in = WithoutWeights(model, dtype)  # the routes' plans are made for these prompts
    rows, problems = [], []
    for place, prompt in enumerate(prompts):
        try:
            images, audios = ([medium] if medium else [] for medium in (prompt.image, prompt.audio))
            inputs = chat.prepare(stand_in, list(prompt.token_ids) or prompt.text, images=images, audios=audios)
        except RequestError as exc:
            problems.append(f"{prompt.id}: {exc}")
            continue
        file = file_of(out, place)
        save_file({name: tensor.contiguous() for name, tensor in inputs.tensors.items()}, str(file))
        rows.append({"id": prompt.id, "file": str(file), "prompt_tokens": inputs.prompt_tokens, "has_media": inputs.has_media})
    if problems:
        raise RequestError("\n  - ".join([f"{len(problems)} refused", *problems]), field="prompts")
    return rows


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Run `prepare` in a separate process; emit the rows and return them."""
    prompts = [Prompt(**{**row, "token_ids": tuple(row.get("token_ids", ()))}) for row in request["prompts"]]
    rows = prepare(Path(request["model"]), request["dtype"], prompts, Path(request["out"]))
    emit({"event": "prepared", "rows": rows})
    return rows
