"""The routes of the API: what each does, the schema of its body, and the types of its answer and of each streamed event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from trimtab.serve.api import answer_types, schemas
from trimtab.serve.api.messages_api import CountRequest, MessagesRequest
from trimtab.serve.api.responses_api import ResponsesRequest
from trimtab.serve.contract.settings import RELOAD

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"


@dataclass(frozen=True)
class Described:
    """A route. answer: the type of a whole one (None: text, no JSON). body: None for GET. event: the type of a streamed chunk, or
    those of named events."""

    words: str
    answer: Any
    body: type[BaseModel] | None = None
    event: Any = None


ROUTES: Mapping[str, Described] = {
    "/health": Described("Whether this process answers", answer_types.Health),
    "/ready": Described("Whether a model could answer now", answer_types.Health),
    "/metrics": Described("Metrics in Prometheus' text form", None),
    "/openapi.json": Described("This description", answer_types.Object),
    "/v1/models": Described("Every model and adapter that is served", answer_types.ModelList),
    "/v1/models/{name}": Described("One of them", answer_types.Model),
    "/api/status": Described("What the page shows", answer_types.Status),
    CHAT: Described(
        "Answer a chat, whole or as a stream of server-sent events", answer_types.ChatCompletion, schemas.ChatRequest,
        answer_types.ChatCompletionChunk,
    ),
    COMPLETIONS: Described(
        "Continue a text or token ids", answer_types.Completion, schemas.CompletionRequest, answer_types.Completion,
    ),
    RESPONSES: Described(
        "Answer in OpenAI's Responses form, stateless", answer_types.Response, ResponsesRequest, answer_types.ResponseEvent,
    ),
    MESSAGES: Described("Answer in Anthropic's form", answer_types.AnthropicMessage, MessagesRequest, answer_types.MessageEvent),
    COUNT_TOKENS: Described("Count the tokens of such a request", answer_types.TokenCount, CountRequest),
    EMBEDDINGS: Described("One vector per text", answer_types.Embeddings, schemas.EmbeddingsRequest),
    TOKENIZE: Described("The tokens of a text or chat", answer_types.Tokens, schemas.TokenizeRequest),
    DETOKENIZE: Described("The text of tokens", answer_types.TokensText, schemas.DetokenizeRequest),
    "/v1/load_lora_adapter": Described(
        "Load an adapter below the server's folder", answer_types.AdapterChanged, schemas.LoadAdapterRequest
    ),
    "/v1/unload_lora_adapter": Described("Unload an adapter", answer_types.AdapterChanged, schemas.UnloadAdapterRequest),
}  # fmt: skip
# Routes that a server may have in addition.
BESIDE: Mapping[str, Described] = {
    RELOAD: Described("Reload settings, keys and adapters", answer_types.Reloaded, schemas.ReloadRequest)
}
REQUESTS: Mapping[str, type[BaseModel]] = {path: route.body for path, route in ROUTES.items() if route.body is not None}
# Routes whose bodies may have images and audio; routes with token ids in addition to other values; routes with errors
# in Anthropic's form.
WITH_MEDIA = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE)
WITH_IDS = (COMPLETIONS, EMBEDDINGS, DETOKENIZE)
ANTHROPICS = (MESSAGES, COUNT_TOKENS)
