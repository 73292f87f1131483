"""Known adapter bugs in Ollama."""

from __future__ import annotations

from trimtab.doctor.servers.known import Server, ServerBug

READ = "2026-11"
THREAD = "https://github.com/ollama/ollama"

OLLAMA = Server(
    name="Ollama",
    checks=(
        "`ollama show --modelfile NAME` has an ADAPTER line, and FROM names the base that the adapter was trained on",
        "run `trimtab verify --against ollama:NAME --remote-base BASE`: raw generation, with logprobs from 0.12.11 on",
        "TEMPLATE: a template that differs changes the base's answers as well; it is not a fault of the adapter",
    ),
    bugs=(
        ServerBug(
            id="O1", title="an adapter is loaded and has no effect", fault="ignored", when="adapters in the old GGML form",
            way_round="convert to GGUF, or merge and import the merged model", seen="0.1.29",
            merged=True,
            sources=(f"{THREAD}/issues/4825", f"{THREAD}/issues/5788", f"{THREAD}/pull/6327"),
            state="closed: the old form is no longer supported, GGUF and safetensors are", read=READ,
        ),
        ServerBug(
            id="O2", title="`ollama create` reports success and the model is missing",
            when="safetensors adapters for a family that the importer does not support", way_round="merge, or convert to GGUF",
            sources=(f"{THREAD}/issues/7781",), state="open", read=READ,
        ),
        ServerBug(
            id="O3", title="adapter_config.json is not found", when="ADAPTER names the file",
            way_round="name the folder that holds both files", seen="0.5.13", sources=(f"{THREAD}/issues/9505",), state="open",
            read=READ,
        ),
        ServerBug(
            id="O4", title="lora_alpha with a decimal point cannot be read", when="adapters whose config says 32.0",
            way_round="write a whole number", sources=(f"{THREAD}/pull/17377",), state="fix proposed, open", read=READ,
        ),
        ServerBug(
            id="O5", title="the OpenAI-compatible API gives no logprobs", when="chat and completions of earlier releases",
            fixed_in="0.12.11", evidence="users of 0.12.11 get logprobs by its OpenAI-compatible API",
            way_round="upgrade: Ollama's own API, which --against ollama:NAME uses, returns them from the same release on",
            sources=(f"{THREAD}/issues/16117", "https://github.com/BerriAI/litellm/issues/17165"), state="closed", read=READ,
        ),
        ServerBug(
            id="O6", title="`ollama create` refuses a Modelfile with an ADAPTER line",
            when="new models with an adapter; models made before still answer",
            since="0.34.1", evidence="a project whose build broke with 0.34.1 names the change",
            way_round="merge and import the merged model, or create the model with an older release",
            sources=(f"{THREAD}/pull/14969", "https://github.com/generative-computing/mellea/issues/1651"),
            state="pull request merged: removed on purpose", read=READ,
        ),
    ),
)  # fmt: skip
