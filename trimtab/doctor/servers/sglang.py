"""Known adapter bugs in SGLang."""

from __future__ import annotations

from trimtab.doctor.servers.known import Server, ServerBug

READ = "2026-11"
THREAD = "https://github.com/sgl-project/sglang"

SGLANG = Server(
    name="SGLang",
    checks=(
        "the request names the adapter: model \"BASE:ADAPTER\", or lora_path beside the model; the base's name alone is the base",
        "the adapter's config has no use_rslora: it is scaled by alpha / r",
        "the adapter changes language modules only",
    ),
    bugs=(
        ServerBug(
            id="S1", title="rsLoRA is scaled by alpha / r: sqrt(r) times too weak", fault="scale", when="use_rslora",
            way_round="multiply lora_alpha by sqrt(r) and remove use_rslora, or merge", sources=(f"{THREAD}/issues/40835",),
            state="open", read=READ,
        ),
        ServerBug(
            id="S2", title="the part on towers and connectors is dropped, or meets the language layers of the same number",
            fault="tower parts dropped", when="multimodal adapters", way_round="merge",
            sources=(f"{THREAD}/issues/28784", f"{THREAD}/pull/39798"), state="closed as inactive; a fix of the gate is open",
            read=READ,
        ),
        ServerBug(
            id="S3", title="a Gemma 4 adapter without v_proj in KV-shared layers does not load", when="Gemma 4 E2B and E4B",
            way_round="merge", seen="0.5.12", sources=(f"{THREAD}/issues/25913", f"{THREAD}/pull/28199"),
            state="closed as inactive; fix proposed, open", read=READ,
        ),
        ServerBug(
            id="S4", title="a request without an adapter gets the previous request's adapter", fault="another adapter",
            when="alternating requests with and without adapters", way_round="upgrade", fixed_in="0.4.6.post2",
            evidence="the package 0.4.6.post1 keeps the last adapters for a batch without any, 0.4.6.post2 does not",
            sources=(f"{THREAD}/issues/4739",), state="closed", read=READ,
        ),
        ServerBug(
            id="S5", title="the adapter's name as model is not understood", fault="ignored",
            when="releases before the model parameter could name an adapter", way_round="give lora_path in the request, or upgrade",
            fixed_in="0.5.4", evidence="the package 0.5.4 reads BASE:ADAPTER, 0.5.3.post3 does not",
            sources=(f"{THREAD}/pull/11570",), state="pull request merged", read=READ,
        ),
    ),
)  # fmt: skip
