"""What is known about adapters in Ollama."""

from __future__ import annotations

from trimtab.doctor.servers.known import Server, ServerBug

READ = "2026-11"
THREAD = "https://github.com/ollama/ollama"

OLLAMA = Server(
    name="Ollama",
    checks=(
        "`ollama show --modelfile NAME` has an ADAPTER line, and FROM names the base that the adapter was trained on",
        "ask `trimtab verify --against ollama:NAME --remote-base BASE`: raw generation, with logprobs from 0.12.11 on",
        "TEMPLATE: a template that differs changes the base's answers as well; it is no fault of the adapter's",
    ),
    bugs=(
        ServerBug(
            id="O1", title="an adapter is loaded and has no effect", fault="ignored", when="adapters in the old GGML form",
            way_round="convert to GGUF, or merge and import the merged model", seen="0.1.29",
            sources=(f"{THREAD}/issues/4825",), state="closed", read=READ,
        ),
        ServerBug(
            id="O2", title="`ollama create` says that all is well and the model is not there",
            when="safetensors adapters for a family that the importer does not know", way_round="merge, or convert to GGUF",
            sources=(f"{THREAD}/issues/7781",), state="open", read=READ,
        ),
        ServerBug(
            id="O3", title="adapter_config.json is not found", when="ADAPTER names the file",
            way_round="name the folder that holds both files", seen="0.5.13", sources=(f"{THREAD}/issues/9505",), state="open",
            read=READ,
        ),
        ServerBug(
            id="O4", title="lora_alpha with a decimal point is not read", when="adapters whose config says 32.0",
            way_round="write a whole number", sources=(f"{THREAD}/pull/17377",), state="fix proposed, open", read=READ,
        ),
        ServerBug(
            id="O5", title="the OpenAI-compatible API gives no logprobs", when="chat and completions of some releases",
            way_round="--against ollama:NAME uses the own API", sources=(f"{THREAD}/issues/16117",), state="closed", read=READ,
        ),
    ),
)  # fmt: skip
