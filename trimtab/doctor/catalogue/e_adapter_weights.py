"""Which adapter weights are not applied?"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Heard, Kit, error_of, quiet


def _one_layer(kit: Kit) -> Path:
    """Return an adapter for two layers whose file has the weights of the first alone."""
    from safetensors.torch import load_file, save_file

    folder = kit.folder / "one-layer"
    if not folder.exists():
        shutil.copytree(kit.adapter(kit.checkpoint("llama"), targets=["q_proj"]), folder)
        weights = folder / "adapter_model.safetensors"
        save_file({key: tensor for key, tensor in load_file(weights).items() if ".layers.0." in key}, weights, {"format": "pt"})
    return folder


def _attached(kit: Kit, adapter: Path, *words: str, **options: Any) -> tuple[Any, str, Heard]:
    """Return the model with the adapter, PEFT's refusal if its error has one of these words, and PEFT's messages."""
    base, models = kit.load(kit.checkpoint("llama")), []
    with quiet() as messages:
        load = partial(kit.peft, base, adapter, **options)
        fault = error_of(lambda: models.append(load()), (KeyError, RuntimeError, ValueError), *words)
    return (None, f"refused: {fault}", messages) if fault else (models[0], "", messages)


E1_MISSING_KEYS = Bug(
    title="An adapter with missing weights loads with a warning and does nothing there",
    symptom="UserWarning \"Found missing adapter keys while loading the checkpoint\", and the run goes on: those "
    "modules have a fresh LoRA, which is zero (or random if init_lora_weights was false). PeftModel.load_adapter and "
    "transformers load_adapter do not even warn through warnings",
    trigger="keys renamed by another release or tool, towers left out, an adapter of another model",
    cause="PEFT peft_model.py loads with strict=False; from_pretrained warns, load_adapter returns the names, "
    "transformers writes a log line that set_verbosity_error hides",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="compare the keys of the file with the model's, or the answers with those of the base",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#2566 (closed)",
        "huggingface/peft#2699 (closed)",
        "huggingface/peft#2118 (the warning, merged)",
        "huggingface/transformers#34068 (merged)",
        "huggingface/transformers#46766 (merged)",
    ),
    trimtab="every key of the file is applied, or named with its reason, or the adapter is refused with the whole list",
    evidence="run",
)  # fmt: skip


def e1_missing_keys(kit: Kit) -> Seen:
    """Load an adapter from a file that lacks one of two layers."""
    model, refusal, messages = _attached(kit, _one_layer(kit), "missing", "Missing", "lora_")
    if refusal:
        return Seen(FIXED, refusal)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    change = float(layer.get_delta_weight("default").abs().max())
    warned = any("missing adapter keys" in line for line in messages)
    reported = "a warning" if warned else "no warning"
    return Seen(PRESENT, f"loads with {reported}; the layer that the file lacks changes its weight by {change:.2f}")


E2_MISSING_LOWMEM = Bug(
    title="Missing adapter keys and low_cpu_mem_usage=True: LoRA weights without data, arbitrary answers",
    symptom="silent after the warning of E1: those LoRA weights are on the meta device, and a forward pass on the "
    "CPU gives other numbers, NaN among them, each time",
    trigger="PeftModel.from_pretrained(..., low_cpu_mem_usage=True) with a file that lacks keys",
    cause="PEFT makes the LoRA layers on meta and fills what the file has; nothing checks what is left. Operators "
    "that mix a meta tensor with a real one compute on uninitialized memory",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run on the CPU (both, not only the newest); not tried on CUDA",
    way_round="look for parameters on meta after loading",
    trimtab="an adapter is attached whole or not at all, from keys that were all matched before",
    evidence="run",
)  # fmt: skip


def e2_missing_lowmem(kit: Kit) -> Seen:
    """Load an adapter that lacks one of two layers with low_cpu_mem_usage, and run it."""
    model, refusal, _ = _attached(kit, _one_layer(kit), "missing", "Missing", "lora_", low_cpu_mem_usage=True)
    if refusal:
        return Seen(FIXED, refusal)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not empty:
        return Seen(FIXED, "no LoRA weight was left without data")
    fault = error_of(lambda: kit.forward(model), (NotImplementedError, RuntimeError))
    ending = f"gives {fault}" if fault else "still answers"
    return Seen(PRESENT, f"{len(empty)} LoRA weights on meta, such as {empty[0]}; the forward pass {ending}")


E3_EXTRA_KEYS = Bug(
    title="Adapter weights that the configuration does not target are dropped silently",
    symptom="silent: tensors of the file for modules outside target_modules (towers left out of it, for example) are "
    "not applied",
    trigger="PeftModel.from_pretrained with a config whose target_modules is narrower than the file; "
    "PeftModel.load_adapter returns the names as unexpected_keys, and warns no more than that",
    cause="PEFT utils/save_and_load.py loads with strict=False, and peft_model.py from_pretrained warns of missing "
    "keys alone",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run (both, not only the newest)",
    way_round="compare the keys of the file with those of the loaded model, or read what load_adapter returns",
    trackers=(
        "huggingface/peft#2118 (warns of missing keys alone, merged)",
        "huggingface/peft#481 (load_adapter returns the names, merged)",
    ),
    trimtab="target_modules is not what decides: every key of the file is matched, and one that fits nothing is an "
    "error",
    evidence="run",
)  # fmt: skip


def e3_extra_keys(kit: Kit) -> Seen:
    """Load a file with weights for q_proj and v_proj under a configuration that names only q_proj."""
    narrow = kit.folder / "e3"
    if not narrow.exists():
        shutil.copytree(kit.adapter(kit.checkpoint("llama"), targets=["q_proj", "v_proj"]), narrow)
        config = json.loads((narrow / "adapter_config.json").read_text(encoding="utf-8"))
        (narrow / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}), encoding="utf-8")
    model, refusal, messages = _attached(kit, narrow, "v_proj")
    if refusal:
        return Seen(FIXED, refusal)
    if any("v_proj" in name and "lora_" in name for name, _ in model.named_parameters()):
        return Seen(FIXED, "the weights were applied although target_modules does not name their module")
    reports = [line for line in messages if "unexpected" in line.lower() or "v_proj" in line]
    if reports:
        return Seen(FIXED, f"said: {reports[0][:120]}")
    return Seen(PRESENT, "4 tensors of the file were not applied, and nothing was reported")


E4_SERVERS = Bug(
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


def e4_servers(kit: Kit) -> Seen:
    """Report the installed server: only a running server shows whether its adapters have an effect."""
    text = "only answers of the running server, with and without the adapter, can tell"
    return Seen(UNKNOWN, f"vllm {kit.version('vllm')} is installed; {text}")
