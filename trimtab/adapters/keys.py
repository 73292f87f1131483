"""Tensor names in an adapter file: the module, the role, and the model's spelling of the path.

`parse_key` reads one name. `Rewrite` is one known spelling of module paths (PEFT, older transformers, text-only
classes, servers); `REWRITES` lists all of them in order. Names only: the caller checks whether a path exists. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.checkpoint.anatomy import Part

PEFT_HEAD = "base_model.model."
Role = Literal[
    "A", "B", "B_bias", "embedding_A", "embedding_B", "magnitude", "saved", "base_copy", "original", "training_only"
]  # fmt: skip

_LORA_ROLES: dict[str, Role] = {
    "lora_A": "A", "lora_B": "B", "lora_embedding_A": "embedding_A", "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude", "lora_velora_embed": "training_only",
    "lora_monteclora_sampler": "training_only",
}  # fmt: skip
_KNOWN_BUT_NOT_LORA = {
    "lora_diag": "KaSA's diagonal", "lora_arrow": "Arrow routing", "token_adapter": "trainable tokens",
    "trainable_tokens_delta": "trainable tokens", "trainable_tokens_indices": "trainable tokens",
    "lora_E": "AdaLoRA", "hada_w1_a": "LoHa", "lokr_w1": "LoKr", "vera_lambda_b": "VeRA", "oft_R": "OFT",
    "ia3_l": "IA3", "prompt_embeddings": "prompt tuning",
}  # fmt: skip

_PARTS: tuple[tuple[Part, frozenset[str]], ...] = (
    ("connector", frozenset(("embed_vision", "embed_audio", "multi_modal_projector", "mm_projector"))),
    ("vision", frozenset(("vision_tower", "vision_model", "visual", "image_tower", "video_tower", "vision_embedder"))),
    ("audio", frozenset(("audio_tower", "audio_model", "audio_encoder"))),
    ("head", frozenset(("lm_head",))),
)


@dataclass(frozen=True)
class AdapterKey:
    """The parts of one tensor name.

    path: the module as the adapter spells it, prefix included. role "original": the base's own tensor below a saved
    module. parameter: of a saved module, else "". name: the adapter's name if the key contains one ("default"), as in
    raw state dicts. problem: why the key cannot be used, else "".
    """

    adapter_key: str
    path: str
    role: Role
    parameter: str = ""
    name: str | None = None
    problem: str = ""


def parse_key(adapter_key: str) -> AdapterKey:
    """Return the parts of a key; a key that cannot be used has a `problem`.

    Source: PEFT 0.21.2, utils/save_and_load.py and tuners_utils.py, _remove_adapter_name_from_state_dict_key; DoRA's
    magnitude is written without ".weight" although the module has one (lora/model.py).
    """
    segments = adapter_key.split(".")
    for index in range(len(segments) - 1, 0, -1):
        if segments[index] in _LORA_ROLES:
            return _lora_key(adapter_key, segments, index)
    foreign = next((_KNOWN_BUT_NOT_LORA[segment] for segment in segments if segment in _KNOWN_BUT_NOT_LORA), None)
    if foreign is None and any(segment.startswith("lora_") for segment in segments):
        foreign = "an unknown kind of LoRA tensor"
    if foreign is not None:
        return AdapterKey(adapter_key, adapter_key, "saved", problem=f"{foreign} is not supported")
    if "modules_to_save" in segments[1:-1]:
        index = segments.index("modules_to_save", 1)
        before, after = segments[:index], segments[index + 1 :]
        name = after[0] if len(after) > 1 else None
        return AdapterKey(adapter_key, ".".join(before + after[1:-1]), "saved", after[-1], name)
    if "original_module" in segments[1:-1]:
        index = segments.index("original_module", 1)
        return AdapterKey(adapter_key, ".".join(segments[:index] + segments[index + 1 : -1]), "original", segments[-1])
    if len(segments) > 2 and segments[-2] == "base_layer":
        return AdapterKey(adapter_key, ".".join(segments[:-2]), "base_copy", segments[-1])
    if len(segments) == 1:
        return AdapterKey(adapter_key, adapter_key, "saved", problem="names no module")
    return AdapterKey(adapter_key, ".".join(segments[:-1]), "saved", segments[-1])


def _lora_key(adapter_key: str, segments: list[str], index: int) -> AdapterKey:
    path, rest = ".".join(segments[:index]), segments[index + 1 :]
    role = _LORA_ROLES[segments[index]]
    if role == "training_only":
        return AdapterKey(adapter_key, path, role)
    leaf = ""
    if role in ("A", "B"):
        leaf = rest.pop() if rest else ""
    elif role == "magnitude" and rest and rest[-1] == "weight":
        rest.pop()
    if leaf == "bias" and role == "B":
        role = "B_bias"
    elif leaf not in ("", "weight") or (role in ("A", "B") and not leaf):
        return AdapterKey(adapter_key, path, role, problem=f"PEFT writes no such tensor of {segments[index]}")
    if len(rest) > 1:
        return AdapterKey(adapter_key, path, role, problem="more name parts than PEFT writes")
    return AdapterKey(adapter_key, path, role, name=rest[0] if rest else None)


def own_path(path: str) -> str:
    """Return the path that the module had during training: the adapter's spelling without PEFT's head."""
    return path.removeprefix(PEFT_HEAD)


def part_of_key(adapter_key: str) -> Part:
    """Return the part of the model in which a name lies, judged by the name alone."""
    segments = set(adapter_key.split("."))
    return next((part for part, names in _PARTS if segments & names), "language")


@dataclass(frozen=True)
class Rewrite:
    """One spelling of module paths in adapters: `head` is removed, then the first matching move is applied.

    A start without a final dot matches that whole name and everything below it. An empty start matches everything.
    """

    head: str
    moves: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The rule as text: only the head, or "as written in the file -> as in the model"."""
        if not self.moves:
            return self.head
        start, target = self.moves[0]
        return f"{self.head}{start} -> {target}"

    def apply(self, path: str) -> str | None:
        """Return the model's spelling, or None for a path that this rule does not cover."""
        if not path.startswith(self.head):
            return None
        path = path[len(self.head) :]
        for start, target in self.moves:
            if start and not start.endswith("."):
                if path == start or path.startswith(f"{start}."):
                    return target + path[len(start) :]
            elif path.startswith(start):
                return target + path[len(start) :]
        return path

    def unapply(self, path: str) -> str | None:
        """Return the spelling of a model's path in this rule's adapters, without PEFT's head; None if they cannot name
        it.
        """
        for start, target in self.moves or (("", ""),):
            is_whole = bool(start) and not start.endswith(".")
            if path == target or path.startswith(f"{target}." if is_whole else target):
                old = start + path[len(target) :]
                if self.apply(self.head + old) == path:
                    return old
        return None


_HEAD = ("lm_head", "lm_head")
_MOVES: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    # A class without the language modelling head has no leading "model.".
    (("", "model."),),
    # Before transformers 4.52, multimodal classes had the text model with its head and the towers as siblings.
    (
        ("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"), _HEAD,
        ("model.", "model."), ("", "model."),
    ),
    (("model.language_model.model.", "model.language_model."), ("model.language_model.lm_head", "lm_head")),
    # A text-only class, and Qwen2-VL before 4.52, call the text model "model".
    (("model.", "model.language_model."), ("visual.", "model.visual."), _HEAD),
    # The same without a head.
    (("", "model.language_model."),),
    # One "model." too many.
    (("model.model.", "model."), ("model.lm_head", "lm_head")),
    # The text part of a multimodal adapter on a text-only class.
    (("model.language_model.", "model."),),
    (("language_model.model.", "model."), ("language_model.lm_head", "lm_head")),
)  # fmt: skip

# PEFT writes its head before every path; servers and converters omit it.
REWRITES: tuple[Rewrite, ...] = tuple(Rewrite(head, moves) for head in (PEFT_HEAD, "") for moves in _MOVES)
