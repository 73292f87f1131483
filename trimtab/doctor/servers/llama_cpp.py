"""Known adapter bugs in llama.cpp's server and its Python package."""

from __future__ import annotations

from trimtab.doctor.servers.known import Server, ServerBug

READ = "2026-11"
THREAD = "https://github.com/ggml-org/llama.cpp"

LLAMA_CPP = Server(
    name="llama.cpp",
    checks=(
        "GET /lora-adapters lists the adapter with a scale other than 0; the model name in a request selects nothing",
        "the GGUF of the adapter was converted with the same base, and the converter reported no omitted tensor",
        "the base's quantization: run verify with --remote-base, or its noise hides small faults",
    ),
    bugs=(
        ServerBug(
            id="L1", title="adapters that should start with scale 0 are active, and \"lora\": [] does not switch them off",
            fault="another adapter", when="--lora-init-without-apply, or an empty lora list in a request",
            way_round="set every scale by POST /lora-adapters", seen="b10088",
            sources=(f"{THREAD}/issues/28674", f"{THREAD}/pull/28707"), state="open, fix proposed", read=READ,
        ),
        ServerBug(
            id="L2", title="a cached prompt of another adapter is used", fault="another adapter",
            when="adapters chosen per request with the same beginning of the prompt", way_round="cache_prompt: false",
            seen="b10121", sources=(f"{THREAD}/issues/26207",), state="open", read=READ,
        ),
        ServerBug(
            id="L3", title="the same adapters answer every model name", fault="ignored",
            when="a client that names the adapter as model: adapters are chosen by the field lora, or for all requests",
            way_round="set the scale by POST /lora-adapters", sources=(f"{THREAD}/pull/10994", f"{THREAD}/pull/8857"),
            state="as designed", read=READ,
        ),
        ServerBug(
            id="L4", title="conversion omits the head's part of a Gemma 2 adapter", fault="one module dropped",
            when="adapters on lm_head of a model with tied embeddings, converted with an older release",
            way_round="convert again with a later converter (it refuses such adapters), or merge", fixed_in="b3826",
            evidence="the converter of build 3826 refuses the adapter; builds shortly before it were not read",
            sources=(f"{THREAD}/issues/9065", f"{THREAD}/pull/9103"), state="pull request merged", read=READ,
        ),
        ServerBug(
            id="L5", title="DoRA cannot be converted", when="use_dora", way_round="merge", sources=(f"{THREAD}/issues/6536",),
            state="closed as stale", read=READ,
        ),
    ),
)  # fmt: skip
