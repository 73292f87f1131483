"""What is known about adapter bugs of vLLM, SGLang, llama.cpp and Ollama: releases, effect, threads, and the check."""

from __future__ import annotations

import re
from dataclasses import dataclass

APPLIES, MAY_APPLY, FIXED = "applies", "may apply", "fixed"
MERGED, LATER = "fixed upstream, release not known", "came later"
# The fault's name in `verify --against`, if it is one that it tries.
FAULTS = (
    "ignored", "scale", "alpha_pattern ignored", "rank_pattern ignored", "DoRA ignored", "tower parts dropped",
    "connector part dropped",
    "expert part dropped", "one module dropped", "another adapter",
)  # fmt: skip


READ = "2026-11"  # when the threads were read


@dataclass(frozen=True, kw_only=True)
class ServerBug:
    """One entry.

    id: letter and number. title: what a user sees, in one line. when: the affected configuration. fault: its name in
    `verify --against`, "" for a refusal or an occasional wrong answer. seen: the release of the report ("" if not
    given). since: the first release with it, fixed_in: the first without it, if known. merged: the fix is merged, its
    release is unknown. evidence: the source of since and fixed_in. way_round: the workaround. sources: the threads.
    state: theirs, as read on `read`.
    """

    id: str
    title: str
    when: str
    way_round: str
    sources: tuple[str, ...]
    state: str
    read: str = READ
    fault: str = ""
    seen: str = ""
    since: str | None = None
    fixed_in: str | None = None
    merged: bool = False
    evidence: str = ""

    def standing(self, version: str | None) -> str:
        """Return whether it applies to a release: one of the five texts above.

        "applies" from `since` on; if that is unknown, for the release of the report, including its patches.
        """
        here = numbers(version)
        if here is not None and self.fixed_in is not None and here >= (numbers(self.fixed_in) or ()):
            return FIXED
        if self.merged:
            return MERGED
        if here is None:
            return MAY_APPLY
        since, seen = numbers(self.since), numbers(self.seen)
        if since is not None:
            return APPLIES if here >= since else LATER
        return APPLIES if seen is not None and here[: len(seen)] == seen else MAY_APPLY


@dataclass(frozen=True, kw_only=True)
class Server:
    """One kind of server: its entries, and the first checks for any release."""

    name: str
    bugs: tuple[ServerBug, ...]
    checks: tuple[str, ...]


def numbers(version: str | None) -> tuple[int, ...] | None:
    """Return the numbers at the start of a release, None if there are none.

    "0.19.2rc1" -> 0, 19, 2; "0.4.6.post2" -> 0, 4, 6, 2; "b10121" -> 10121.
    """
    matched = re.match(r"[vb]?(\d{1,9}(?:\.(?:post)?\d{1,9}){0,5})", version or "", re.ASCII)
    return tuple(int(part.removeprefix("post")) for part in matched.group(1).split(".")) if matched else None


_VLLM = "https://github.com/vllm-project/vllm"
_SGLANG = "https://github.com/sgl-project/sglang"
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
_OLLAMA = "https://github.com/ollama/ollama"

VLLM = Server(
    name="vLLM",
    checks=(
        "the model name in the request is the adapter's name from /v1/models; the base's name answers without an adapter",
        "the log says which modules of the adapter were skipped; a dropped tower gives only a warning there",
        "the adapter's config has no alpha_pattern or rank_pattern, or every module has the same values",
        "keys of a text adapter begin as the served class spells its modules: model.language_model for a multimodal one",
    ),
    bugs=(
        ServerBug(
            id="V1", title="a Gemma 4 adapter loads and answers are the base's, byte for byte", fault="ignored",
            when="Gemma 4, dense or with experts, adapters saved by Unsloth",
            way_round="merge the adapter (trimtab merge) and serve the merged model", seen="0.19.2",
            sources=(f"{_VLLM}/issues/41754",), state="open",
        ),
        ServerBug(
            id="V2", title="a text adapter has no effect on a multimodal class", fault="ignored",
            when="adapters trained on the text class, served on a class that holds it as language_model (Qwen3-VL, LLaVA, Gemma 3)",
            way_round="rename the keys to model.language_model.*, or merge", seen="",
            sources=(f"{_VLLM}/issues/48019", f"{_VLLM}/pull/48022", f"{_VLLM}/pull/49525"), state="open, fixes proposed",
        ),
        ServerBug(
            id="V3", title="an adapter whose module names have another prefix answers as the base", fault="ignored",
            when="keys that match no module by their full path", way_round="rename the keys, or merge", seen="0.15.1",
            sources=(f"{_VLLM}/issues/34186", f"{_VLLM}/pull/39278"), state="open; a warning was proposed and closed",
        ),
        ServerBug(
            id="V4", title="an adapter outside the allowed target modules answers as the base", fault="ignored",
            when="--lora-target-modules names none of the adapter's modules", way_round="name them, or omit the flag",
            seen="0.28.0", since="0.19.0",
            evidence="the flag came with 0.19.0, by the notes of a package that uses it; the report is of 0.28.0",
            sources=(f"{_VLLM}/issues/55193", f"{_VLLM}/pull/34984"),
            state="closed; the package 0.30.0 writes a debug line and answers as the base",
        ),
        ServerBug(
            id="V5", title="alpha_pattern and rank_pattern are ignored", fault="alpha_pattern ignored",
            when="adapters with other scales or ranks for some modules: the configuration is read without these fields",
            way_round="write the scale into lora_B and remove the patterns, or merge",
            sources=(f"{_VLLM}/blob/02143692ba86a7ba6198a67e12982c5317c8bd2f/vllm/lora/peft_helper.py",),
            state="read in the source of that commit and of the package 0.30.0",
        ),
        ServerBug(
            id="V6", title="rsLoRA is scaled by alpha / r", fault="scale", when="use_rslora", fixed_in="0.7.0",
            evidence="the package 0.6.6.post1 refuses rsLoRA, 0.7.0 scales it by alpha / sqrt(r)", way_round="upgrade",
            sources=(f"{_VLLM}/issues/10798", f"{_VLLM}/pull/6909"), state="pull request merged",
        ),
        ServerBug(
            id="V7", title="rsLoRA on experts is scaled by alpha / r", fault="scale", when="use_rslora with LoRA on experts",
            fixed_in="0.30.0", evidence="the package 0.29.0 packs experts by alpha / r, 0.30.0 by the adapter's own scale",
            way_round="upgrade, or merge, or write the scale into lora_B",
            sources=(f"{_VLLM}/issues/55545", f"{_VLLM}/pull/55548"), state="pull request merged",
        ),
        ServerBug(
            id="V8", title="the experts' part of a Gemma 4 adapter is dropped", fault="expert part dropped",
            when="Gemma 4 with experts, adapters made with target_parameters", way_round="merge", seen="0.23.1",
            sources=(f"{_VLLM}/pull/50252", f"{_VLLM}/issues/41754"), state="fix proposed, open",
        ),
        ServerBug(
            id="V9", title="the part on vision tower and connector is skipped with a warning", fault="tower parts dropped",
            when="multimodal models whose class has no tower LoRA, or without the flag that enables it",
            way_round="look for the class in the list of the issue; else merge",
            sources=(f"{_VLLM}/issues/31479", f"{_VLLM}/issues/23796"), state="closed, done model by model",
        ),
        ServerBug(
            id="V10", title="a cached prompt of another adapter of the same name is used", fault="another adapter",
            when="prefix caching, and an adapter that was loaded again or another one under the same name",
            way_round="load it under a new name, or switch prefix caching off", seen="0.11.1",
            sources=(f"{_VLLM}/issues/30931", f"{_VLLM}/issues/42125", f"{_VLLM}/pull/48352"), state="open, a part fixed",
        ),
        ServerBug(
            id="V11", title="adapters answer wrongly with tensor parallelism", when="more than one GPU",
            way_round="compare with one GPU", sources=(f"{_VLLM}/issues/21471",), state="closed",
        ),
        ServerBug(
            id="V12", title="DoRA and modules_to_save are refused when the adapter is loaded", when="use_dora or modules_to_save",
            way_round="merge", sources=(f"{_VLLM}/issues/6983", f"{_VLLM}/issues/9280"),
            state="closed as stale; the package 0.30.0 still refuses both",
        ),
    ),
)  # fmt: skip

SGLANG = Server(
    name="SGLang",
    checks=(
        "the request names the adapter: model \"BASE:ADAPTER\", or lora_path next to the model; the base's name alone is the base",
        "the adapter's config has no use_rslora: it is scaled by alpha / r",
        "the adapter changes language modules only",
    ),
    bugs=(
        ServerBug(
            id="S1", title="rsLoRA is scaled by alpha / r: sqrt(r) times too weak", fault="scale", when="use_rslora",
            way_round="multiply lora_alpha by sqrt(r) and remove use_rslora, or merge", sources=(f"{_SGLANG}/issues/40835",),
            state="open",
        ),
        ServerBug(
            id="S2", title="the part on towers and connectors is dropped, or meets the language layers of the same number",
            fault="tower parts dropped", when="multimodal adapters", way_round="merge",
            sources=(f"{_SGLANG}/issues/28784", f"{_SGLANG}/pull/39798"), state="closed as inactive; a fix of the gate is open",
        ),
        ServerBug(
            id="S3", title="a Gemma 4 adapter without v_proj in KV-shared layers does not load", when="Gemma 4 E2B and E4B",
            way_round="merge", seen="0.5.12", sources=(f"{_SGLANG}/issues/25913", f"{_SGLANG}/pull/28199"),
            state="closed as inactive; fix proposed, open",
        ),
        ServerBug(
            id="S4", title="a request without an adapter gets the previous request's adapter", fault="another adapter",
            when="alternating requests with and without adapters", way_round="upgrade", fixed_in="0.4.6.post2",
            evidence="the package 0.4.6.post1 keeps the last adapters for a batch without any, 0.4.6.post2 does not",
            sources=(f"{_SGLANG}/issues/4739",), state="closed",
        ),
        ServerBug(
            id="S5", title="the adapter's name as model is not understood", fault="ignored",
            when="releases before the model parameter could name an adapter", way_round="give lora_path in the request, or upgrade",
            fixed_in="0.5.4", evidence="the package 0.5.4 reads BASE:ADAPTER, 0.5.3.post3 does not",
            sources=(f"{_SGLANG}/pull/11570",), state="pull request merged",
        ),
    ),
)  # fmt: skip

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
            sources=(f"{_LLAMA_CPP}/issues/28674", f"{_LLAMA_CPP}/pull/28707"), state="open, fix proposed",
        ),
        ServerBug(
            id="L2", title="a cached prompt of another adapter is used", fault="another adapter",
            when="adapters chosen per request with the same beginning of the prompt", way_round="cache_prompt: false",
            seen="b10121", sources=(f"{_LLAMA_CPP}/issues/26207",), state="open",
        ),
        ServerBug(
            id="L3", title="the same adapters answer every model name", fault="ignored",
            when="a client that names the adapter as model: adapters are chosen by the field lora, or for all requests",
            way_round="set the scale by POST /lora-adapters", sources=(f"{_LLAMA_CPP}/pull/10994", f"{_LLAMA_CPP}/pull/8857"),
            state="as designed",
        ),
        ServerBug(
            id="L4", title="conversion omits the head's part of a Gemma 2 adapter", fault="one module dropped",
            when="adapters on lm_head of a model with tied embeddings, converted with an older release",
            way_round="convert again with a later converter (it refuses such adapters), or merge", fixed_in="b3826",
            evidence="the converter of build 3826 refuses the adapter; builds shortly before it were not read",
            sources=(f"{_LLAMA_CPP}/issues/9065", f"{_LLAMA_CPP}/pull/9103"), state="pull request merged",
        ),
        ServerBug(
            id="L5", title="DoRA cannot be converted", when="use_dora", way_round="merge", sources=(f"{_LLAMA_CPP}/issues/6536",),
            state="closed as stale",
        ),
    ),
)  # fmt: skip

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
            sources=(f"{_OLLAMA}/issues/4825", f"{_OLLAMA}/issues/5788", f"{_OLLAMA}/pull/6327"),
            state="closed: the old form is no longer supported, GGUF and safetensors are",
        ),
        ServerBug(
            id="O2", title="`ollama create` reports success and the model is missing",
            when="safetensors adapters for a family that the importer does not support", way_round="merge, or convert to GGUF",
            sources=(f"{_OLLAMA}/issues/7781",), state="open",
        ),
        ServerBug(
            id="O3", title="adapter_config.json is not found", when="ADAPTER names the file",
            way_round="name the folder that holds both files", seen="0.5.13", sources=(f"{_OLLAMA}/issues/9505",), state="open",
        ),
        ServerBug(
            id="O4", title="lora_alpha with a decimal point cannot be read", when="adapters whose config says 32.0",
            way_round="write a whole number", sources=(f"{_OLLAMA}/pull/17377",), state="fix proposed, open",
        ),
        ServerBug(
            id="O5", title="the OpenAI-compatible API gives no logprobs", when="chat and completions of earlier releases",
            fixed_in="0.12.11", evidence="users of 0.12.11 get logprobs by its OpenAI-compatible API",
            way_round="upgrade: Ollama's own API, which --against ollama:NAME uses, returns them from the same release on",
            sources=(f"{_OLLAMA}/issues/16117", "https://github.com/BerriAI/litellm/issues/17165"), state="closed",
        ),
        ServerBug(
            id="O6", title="`ollama create` refuses a Modelfile with an ADAPTER line",
            when="new models with an adapter; models made before still answer",
            since="0.34.1", evidence="a project whose build broke with 0.34.1 names the change",
            way_round="merge and import the merged model, or create the model with an older release",
            sources=(f"{_OLLAMA}/pull/14969", "https://github.com/generative-computing/mellea/issues/1651"),
            state="pull request merged: removed on purpose",
        ),
    ),
)  # fmt: skip
SERVERS = (VLLM, SGLANG, LLAMA_CPP, OLLAMA)
