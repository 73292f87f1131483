"""Do the other files in an adapter's folder hold trained weights that the adapter needs?

Trainers write fully trained towers, projectors or new embedding rows into separate files. trimtab applies
`adapter_model.safetensors` only, so such a file is a reason to refuse the folder. Training states, other forms of the
same adapter and files without weights are not. Files are judged by their names; none is opened, so no pickle is read.
Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

# Extensions of files with tensors or other trained values.
WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|pkl|npz|npy|distcp|h5|msgpack|pth\.tar)", re.IGNORECASE)
# With these extensions, a file of unknown name is more often data than weights.
DATA = re.compile(r".+\.(pkl|npz|npy)", re.IGNORECASE)
MOST_FILES = 100_000  # the most files of a folder that are checked
_SHOWN = 20

# Names (in lower case) that change nothing, and why.
HARMLESS: Mapping[str, str] = {
    r"adapter_model\.(safetensors|bin)": "the adapter itself; PEFT reads the .bin only where there is no .safetensors",
    r"adapter_model\.pt|adapter_\d+\.pt": "the same adapter in torchtune's form",
    r"ggml-adapter-model[\w.-]*\.bin": "the same adapter for llama.cpp",
    r"(optimizer|optim|(lr_)?scheduler|(grad_)?scaler|sampler|dl_state_dict|recipe_state)[\w.-]*":
        "resumes training (transformers, accelerate, torchtune)",
    r"(rng[_-]state|random_states|custom_checkpoint|training_state|trainer_state|dataloader|train_dataloader)[\w.-]*":
        "resumes training (transformers, accelerate)",
    r"\w+_args\.(bin|pt|pkl)|train_args\.\w+|args\.\w+|hparams\.\w+|config\.pt": "options of the training run",
    r".*(_optim_states|_model_states)\.pt|zero_\w+\.\w+": "resumes training (DeepSpeed)",
    r"pytorch_model_fsdp[\w.-]*": "resumes training (FSDP); the adapter was saved with it",
    r"latest[\w.-]*": "names the newest state (DeepSpeed)",
    r"tokenizer[\w.-]*\.bin|vocab\.\w+": "a tokenizer",
    r"openvino_\w+\.bin": "an export",
    r"(loss|losses|metrics|eval|results|predictions?|embeddings_cache|images?|samples?)[\w-]*\.(npy|npz|pt|pkl)":
        "numbers of an evaluation",
    r"imatrix[\w.-]*": "statistics for quantization",
}  # fmt: skip

# Weights that no answer of a language model uses: reported, not refused.
TOLD: Mapping[str, str] = {
    r"(value_head|v_head|vhead\w*)\.(safetensors|bin|pt)": "the value head of a reward model or of PPO, which no answer uses",
    r"(model|pytorch_model|consolidated)([.-]\d+([.-]of[.-]\d+)?)?\.(safetensors|bin|pth)":
        "a whole model, which is not part of the adapter; name the folder as the model to use it",
}  # fmt: skip

# Weights that change the output, and the part that they belong to.
KNOWN: Mapping[str, str] = {
    r"vit\.safetensors": "a vision tower and projector that ms-swift trained whole",
    r"(non_lora_trainables|non_lora_state_dict)\.\w+": "what LLaVA's and Qwen-VL's trainers trained in addition to LoRA",
    r"\w*(projector|aligner|connector|mlp1|resampler)[\w.-]*": "a trained projector",
    r"\w*(visual|vision|image|audio)[\w.-]*": "a trained tower",
    r"\w*embed(ding)?s?[\w.-]*": "trained rows of an embedding",
    r"\w*(lm_head|score|classifier)[\w.-]*": "a trained head",
    r"adapter_model[\w.-]+": "another part of the adapter, which PEFT does not read",
}
# Names of sub-folders whose weights are part of the same model; all others are ignored.
INNER: Mapping[str, str] = {
    r"\d+_(?!transformer$)\w+": "a module of sentence-transformers behind the model",
    r"vit|\w*(visual|vision|audio)\w*": "a trained tower",
    r"mm\w*|\w*(projector|aligner|connector|resampler)\w*": "a trained projector",
    r"(new_)?embeddings?|modules_to_save": "trained modules",
}


def _why(table: Mapping[str, str], name: str) -> str | None:
    return next((why for pattern, why in table.items() if re.fullmatch(pattern, name.lower())), None)


def _files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from islice(entries, MOST_FILES)


def weights_beside(folder: Path) -> tuple[list[str], list[str]]:
    """Return (problems, notes) about other weights in an adapter's folder: those that change the output, and those that
    do not.

    Errors: OSError.
    """
    problems: dict[str, str] = {}
    notes: dict[str, str] = {}
    for entry in _files(folder):
        name = entry.name
        if entry.is_dir():
            what = _why(INNER, name)
            inner = [] if what is None else [one.name for one in _files(entry.path) if WEIGHTS.fullmatch(one.name)]
            problems |= {f"{name}/{one}": what or "" for one in inner}
        elif WEIGHTS.fullmatch(name) and not _why(HARMLESS, name):
            told, known = _why(TOLD, name), _why(KNOWN, name)
            if told is None and known is None and DATA.fullmatch(name):
                told = "nothing is known of it"
            if told is not None:
                notes[name] = told
            else:
                problems[name] = known or "not known"
    words = [f"{name}: weights beside the adapter ({why})" for name, why in sorted(problems.items())]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more files with weights"]
    if words:
        words[-1] += (
            ". trimtab applies adapter_model.safetensors alone: put the weights into the base's files and name that folder as the "
            "model, or train with modules_to_save. Move the file away if it is not part of the adapter"
        )
    return words, [f"{name} is not used: {why}" for name, why in sorted(notes.items())]
