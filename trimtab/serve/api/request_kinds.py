"""The body schema of each route."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from trimtab.serve.api import schemas as wire
from trimtab.serve.api.messages_api import CountRequest, MessagesRequest
from trimtab.serve.api.responses_api import ResponsesRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
REQUESTS: Mapping[str, type[BaseModel]] = {
    CHAT: wire.ChatRequest, COMPLETIONS: wire.CompletionRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountRequest, EMBEDDINGS: wire.EmbeddingsRequest, TOKENIZE: wire.TokenizeRequest,
    DETOKENIZE: wire.DetokenizeRequest, "/v1/load_lora_adapter": wire.LoadAdapterRequest,
    "/v1/unload_lora_adapter": wire.UnloadAdapterRequest,
}  # fmt: skip
# Routes whose bodies may have images and audio; routes with token ids in addition to other values; routes with errors
# in Anthropic's form.
WITH_MEDIA = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE)
WITH_IDS = (COMPLETIONS, EMBEDDINGS, DETOKENIZE)
ANTHROPICS = (MESSAGES, COUNT_TOKENS)
