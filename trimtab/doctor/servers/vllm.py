"""Known adapter bugs in vLLM."""

from __future__ import annotations

from trimtab.doctor.servers.known import Server, ServerBug

READ = "2026-11"
THREAD = "https://github.com/vllm-project/vllm"

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
            sources=(f"{THREAD}/issues/41754",), state="open", read=READ,
        ),
        ServerBug(
            id="V2", title="a text adapter has no effect on a multimodal class", fault="ignored",
            when="adapters trained on the text class, served on a class that holds it as language_model (Qwen3-VL, LLaVA, Gemma 3)",
            way_round="rename the keys to model.language_model.*, or merge", seen="",
            sources=(f"{THREAD}/issues/48019", f"{THREAD}/pull/48022", f"{THREAD}/pull/49525"), state="open, fixes proposed",
            read=READ,
        ),
        ServerBug(
            id="V3", title="an adapter whose module names have another prefix answers as the base", fault="ignored",
            when="keys that match no module by their full path", way_round="rename the keys, or merge", seen="0.15.1",
            sources=(f"{THREAD}/issues/34186", f"{THREAD}/pull/39278"), state="open; a warning was proposed and closed",
            read=READ,
        ),
        ServerBug(
            id="V4", title="an adapter outside the allowed target modules answers as the base", fault="ignored",
            when="--lora-target-modules names none of the adapter's modules", way_round="name them, or omit the flag",
            seen="0.28.0", since="0.19.0",
            evidence="the flag came with 0.19.0, by the notes of a package that uses it; the report is of 0.28.0",
            sources=(f"{THREAD}/issues/55193", f"{THREAD}/pull/34984"),
            state="closed; the package 0.30.0 writes a debug line and answers as the base", read=READ,
        ),
        ServerBug(
            id="V5", title="alpha_pattern and rank_pattern are ignored", fault="alpha_pattern ignored",
            when="adapters with other scales or ranks for some modules: the configuration is read without these fields",
            way_round="write the scale into lora_B and remove the patterns, or merge",
            sources=(f"{THREAD}/blob/02143692ba86a7ba6198a67e12982c5317c8bd2f/vllm/lora/peft_helper.py",),
            state="read in the source of that commit and of the package 0.30.0", read=READ,
        ),
        ServerBug(
            id="V6", title="rsLoRA is scaled by alpha / r", fault="scale", when="use_rslora", fixed_in="0.7.0",
            evidence="the package 0.6.6.post1 refuses rsLoRA, 0.7.0 scales it by alpha / sqrt(r)", way_round="upgrade",
            sources=(f"{THREAD}/issues/10798", f"{THREAD}/pull/6909"), state="pull request merged", read=READ,
        ),
        ServerBug(
            id="V7", title="rsLoRA on experts is scaled by alpha / r", fault="scale", when="use_rslora with LoRA on experts",
            fixed_in="0.30.0", evidence="the package 0.29.0 packs experts by alpha / r, 0.30.0 by the adapter's own scale",
            way_round="upgrade, or merge, or write the scale into lora_B",
            sources=(f"{THREAD}/issues/55545", f"{THREAD}/pull/55548"), state="pull request merged", read=READ,
        ),
        ServerBug(
            id="V8", title="the experts' part of a Gemma 4 adapter is dropped", fault="expert part dropped",
            when="Gemma 4 with experts, adapters made with target_parameters", way_round="merge", seen="0.23.1",
            sources=(f"{THREAD}/pull/50252", f"{THREAD}/issues/41754"), state="fix proposed, open", read=READ,
        ),
        ServerBug(
            id="V9", title="the part on vision tower and connector is skipped with a warning", fault="tower parts dropped",
            when="multimodal models whose class has no tower LoRA, or without the flag that enables it",
            way_round="look for the class in the list of the issue; else merge",
            sources=(f"{THREAD}/issues/31479", f"{THREAD}/issues/23796"), state="closed, done model by model", read=READ,
        ),
        ServerBug(
            id="V10", title="a cached prompt of another adapter of the same name is used", fault="another adapter",
            when="prefix caching, and an adapter that was loaded again or another one under the same name",
            way_round="load it under a new name, or switch prefix caching off", seen="0.11.1",
            sources=(f"{THREAD}/issues/30931", f"{THREAD}/issues/42125", f"{THREAD}/pull/48352"), state="open, a part fixed",
            read=READ,
        ),
        ServerBug(
            id="V11", title="adapters answer wrongly with tensor parallelism", when="more than one GPU",
            way_round="compare with one GPU", sources=(f"{THREAD}/issues/21471",), state="closed", read=READ,
        ),
        ServerBug(
            id="V12", title="DoRA and modules_to_save are refused when the adapter is loaded", when="use_dora or modules_to_save",
            way_round="merge", sources=(f"{THREAD}/issues/6983", f"{THREAD}/issues/9280"),
            state="closed as stale; the package 0.30.0 still refuses both", read=READ,
        ),
    ),
)  # fmt: skip
