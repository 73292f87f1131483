"""Which parts of transformers' models, tokenizers and processors does the engine use, as types?"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

import torch
from torch import nn


class RopeParameters(TypedDict, total=False):
    partial_rotary_factor: float
    original_max_position_embeddings: int
    llama_4_scaling_beta: float


class LoadingInfo(TypedDict):  # of `from_pretrained`; mismatched: a name, its shape in the file, the model's
    missing_keys: set[str]
    unexpected_keys: set[str]
    mismatched_keys: set[tuple[str, Sequence[int], Sequence[int]]]


class Config(Protocol):
    """A `PreTrainedConfig`: the fields that the engine reads. Not every family has the last ones."""

    model_type: str
    _name_or_path: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    bos_token_id: int | list[int] | None
    layer_types: Sequence[str] | None
    sliding_window: int
    rope_parameters: RopeParameters
    hidden_act: str
    hidden_activation: str
    hidden_size_per_layer_input: int | None
    final_logit_softcapping: float | None
    logits_scaling: float
    vocab_size_per_layer_input: int
    cross_attention_layers: Sequence[int]
    mm_tokens_per_image: int

    def get_text_config(self, decoder: bool = False) -> Config: ...


if TYPE_CHECKING:
    import tokenizers
    from transformers import BatchEncoding, GenerationConfig
    from transformers.utils import ModelOutput

    from trimtab.planning import Plan

    class HFModel(nn.Module):
        """A `PreTrainedModel`, its decoder included."""

        config: Config
        generation_config: GenerationConfig
        base_model: HFModel
        lm_head: nn.Module
        name_or_path: str
        device: torch.device
        dtype: torch.dtype

        def __call__(self, **inputs: object) -> ModelOutput: ...

        @classmethod
        def from_pretrained(cls, folder: None, **options: object) -> tuple[HFModel, LoadingInfo]: ...

        @classmethod
        def can_generate(cls) -> bool: ...

        def get_decoder(self) -> Any: ...

        def get_input_embeddings(self) -> nn.Module: ...

        def get_output_embeddings(self) -> nn.Module | None: ...

        def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> Mapping[str, str]: ...

        def tie_weights(self) -> None: ...

        def generate(self, **inputs: object) -> torch.Tensor | ModelOutput: ...


class ChatTemplateOwner(Protocol):
    """A tokenizer or processor with a chat template."""

    chat_template: object

    def apply_chat_template(self, messages: object, /, **options: object) -> object: ...


class AddedToken(Protocol):
    """A token that was added to a vocabulary."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Tokenizer(ChatTemplateOwner, Protocol):
    """A `PreTrainedTokenizer`, fast or not. It turns a text into a `BatchEncoding`."""

    bos_token: str | None
    unk_token: str | None
    eos_token_id: int | None
    backend_tokenizer: tokenizers.Tokenizer
    all_special_ids: Sequence[int]
    added_tokens_decoder: Mapping[int, AddedToken]

    def __call__(self, text: str | list[str], **options: object) -> BatchEncoding: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> object: ...

    def convert_tokens_to_ids(self, tokens: str, /) -> int: ...

    def decode(self, ids: Sequence[int], /, **options: object) -> object: ...


class MediaProcessor(ChatTemplateOwner, Protocol):
    """A `ProcessorMixin`: texts with images or audio -> inputs."""

    tokenizer: Tokenizer
    feature_extractor: FeatureExtractor

    def __call__(self, text: str | list[str], **options: object) -> MutableMapping[str, object]: ...


class FeatureExtractor(Protocol):
    """The feature extractor: samples -> inputs of an audio tower."""

    def __call__(self, samples: Sequence[object], /, **options: object) -> Mapping[str, object]: ...


# A checkpoint that only reads text has a tokenizer alone.
Processor: TypeAlias = "MediaProcessor | Tokenizer"


class PlacedModel(Protocol):
    """A model, its plan, and where it computes."""

    @property
    def plan(self) -> Plan: ...

    @property
    def hf_model(self) -> HFModel: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...
