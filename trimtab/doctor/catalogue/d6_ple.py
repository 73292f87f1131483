"""D6: offloading the per-layer-embedding table copies all of it at every step."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="Most of an E-series Gemma 4 on the GPU is an embedding table of which one token reads a row; offloading copies it whole",
    symptom="silent: 5.6 of 10.1 GB of E4B are embed_tokens_per_layer; given to \"cpu\", the whole table goes to the "
    "GPU in every forward pass for a few rows",
    trigger="Gemma 4 E2B and E4B on a small GPU, quantized or not: an Embedding is never quantized by bitsandbytes",
    cause="accelerate hooks.py AlignDevicesHook.pre_forward copies whole weights; no part of the stack gathers rows "
    "on the host",
    affected=(Affected("accelerate"), Affected("transformers")),
    versions="accelerate 1.13.0 and 1.15.0 run: bytes moved are those of the table, however few tokens",
    way_round="replace the module with one that reads rows on the CPU and moves the rows",
    trackers=("huggingface/transformers#47705 (closed)", "ggml-org/llama.cpp#14400 (keeps it on the CPU)"),
    trimtab="the table is gathered: rows are fetched from host memory or from the file, the table never comes to the "
    "GPU",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Measure the bytes copied to the execution device when the table is offloaded and one short text is run."""
    language = "model.language_model"
    resident = ("embed_tokens", "layers", "norm", "rotary_emb", "per_layer_model_projection", "per_layer_projection_norm")
    places: dict[str, int | str] = {f"{language}.{name}": 0 for name in resident}
    places |= {f"model.{name}": 0 for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")}
    places |= {"lm_head": 0, f"{language}.embed_tokens_per_layer": "cpu"}
    model = kit.load(kit.checkpoint(), device_map=places)
    table = model.model.language_model.embed_tokens_per_layer
    own_forward, moved = table._old_forward, []

    def watched(ids: Any) -> Any:
        moved.append((table.weight.nbytes, ids.numel() * table.weight[0].nbytes))
        return own_forward(ids)

    table._old_forward = watched
    kit.forward(model)
    moved_bytes, needed = moved[0]
    text = f"rows of {needed:,} bytes are needed, {moved_bytes:,} bytes came to the execution device"
    return Seen(PRESENT if moved_bytes > needed else FIXED, text)
