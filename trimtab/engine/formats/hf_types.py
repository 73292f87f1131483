"""Which parts of transformers' models, tokenizers and processors does the engine use, as types?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:

    class HFModel(nn.Module):
        """A `PreTrainedModel`, its decoder included."""

        config: Any
        generation_config: Any
        base_model: HFModel
        lm_head: nn.Module
        name_or_path: str

        @property
        def device(self) -> torch.device: ...

        @property
        def dtype(self) -> torch.dtype: ...

        def __call__(self, **inputs: object) -> Any: ...

        @classmethod
        def can_generate(cls) -> bool: ...

        def get_decoder(self) -> Any: ...

        def get_input_embeddings(self) -> nn.Module: ...

        def get_output_embeddings(self) -> nn.Module | None: ...

        def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> Mapping[str, str]: ...

        def tie_weights(self) -> None: ...

        def generate(self, **inputs: object) -> Any: ...


class ChatTemplateOwner(Protocol):
    """A tokenizer or processor with a chat template."""

    chat_template: object

    def apply_chat_template(self, messages: Any, /, **options: object) -> object: ...


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
    backend_tokenizer: Any

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def __call__(self, text: str, **options: object) -> Any: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> object: ...

    def convert_tokens_to_ids(self, tokens: str, /) -> int: ...

    def decode(self, ids: Sequence[int], /, **options: object) -> object: ...


class FeatureExtractor(Protocol):
    """The feature extractor: samples -> inputs of an audio tower."""

    def __call__(self, samples: Sequence[object], /, **options: object) -> Mapping[str, object]: ...
