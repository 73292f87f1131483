"""E4: servers ignore adapters of models that keep their text part under language_model."""

from __future__ import annotations

from trimtab.doctor.facts.bug import UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="vLLM: a LoRA on a model with a language_model part can load and change nothing",
    symptom="silent: the adapter is accepted, and answers are those of the base, byte for byte",
    trigger="text adapters made by PEFT or Unsloth on a multimodal model (Gemma 4, Mistral 3 and others) served by "
    "vLLM; sglang had the same",
    cause="names in the adapter and names in the server differ by the language_model prefix; a key that matches no "
    "module is left out",
    affected=(Affected("vllm"),),
    versions="reported by others up to the summer of 2026; not run by us",
    way_round="compare one answer with and without the adapter before serving",
    owner=("servers",),
    trackers=(
        "vllm-project/vllm#48019 (open when last seen)",
        "vllm-project/vllm#34186 (open when last seen)",
        "vllm-project/vllm#41754 (Gemma 4, open when last seen)",
        "vllm-project/vllm#38844 (pull request, merged)",
        "sgl-project/sglang#25913 (closed)",
    ),
    trimtab="a key that matches no module is an error, never left out",
    evidence="tracker",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Report the installed server: only a running server shows whether its adapters have an effect."""
    text = "only answers of the running server, with and without the adapter, can tell"
    return Seen(UNKNOWN, f"vllm {kit.version('vllm')} is installed; {text}")
