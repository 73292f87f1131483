"""Which configurations and processors are read wrongly?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, error_of, seen

I7_PER_LAYER_ATTRIBUTE = Bug(
    title="getattr(config, \"head_dim\", default) raises on Gemma 4: a per-layer attribute is a RuntimeError",
    symptom="AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers",
    trigger="any code that reads head_dim (or another attribute that differs between layers) from a Gemma 4 text "
    "config; hasattr and getattr with a default do not help",
    cause="transformers integrations/heterogeneity/configuration_utils.py raises a RuntimeError where Python's own "
    "protocol wants an AttributeError",
    affected=(Affected("transformers", since="5.15.0"),),
    versions="5.23.0 run, raises; 5.6.2 run, gives the value; in 5.15.0 and not in 5.13.0 (read in the wheels)",
    way_round="config.per_layer_config[layer].head_dim, or allow_global_per_layer_attribute_access = True on the "
    "config",
    trackers=(
        "huggingface/transformers#47384 (named by vLLM as its origin)",
        "vllm-project/vllm#52768 (closed)",
        "vllm-project/compressed-tensors#844 (pull request, open)",
    ),
    trimtab="sizes are read from each layer's own config where there is one",
    evidence="run",
)  # fmt: skip


def i7_per_layer_attribute(kit: Kit) -> Seen:
    """Read head_dim of a Gemma 4 whose global layers have wider heads, with a default."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(kit.checkpoint()).get_text_config()
    fault = error_of(lambda: getattr(config, "head_dim", None), RuntimeError)
    return Seen(PRESENT, fault) if fault else Seen(FIXED, f"getattr gives {getattr(config, 'head_dim', None)}")


I9_PROCESSOR_TORCHVISION = Bug(
    title="AutoProcessor for Gemma 4 fails without torchvision, even if only text is wanted",
    symptom="ImportError: Gemma4VideoProcessor requires the Torchvision library but it was not found in your "
    "environment",
    trigger="AutoProcessor.from_pretrained for Gemma 4 (or another model with a video processor) where torchvision "
    "is not installed",
    cause="transformers processing_utils.py makes every part of a processor, and video processors exist for "
    "torchvision alone",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run without torchvision; others report it from 5.4.0 on",
    way_round="install the torchvision that belongs to your torch, or AutoTokenizer for text",
    trackers=("huggingface/transformers#43986 (open when last seen)",),
    trimtab="without torchvision it puts the processor together from its other parts; only videos are refused",
    evidence="run",
)  # fmt: skip
DEMO = Path(__file__).parents[2] / "demo" / "base"


def i9_processor_torchvision(kit: Kit) -> Seen:
    """Load the processor of the bundled Gemma 4."""
    from transformers import AutoProcessor

    if kit.has("torchvision"):
        return Seen(NOT_APPLICABLE, f"torchvision {kit.version('torchvision')} is installed")
    if not (DEMO / "processor_config.json").exists():
        return Seen(UNKNOWN, "the bundled demo model is missing")
    fault = error_of(lambda: AutoProcessor.from_pretrained(DEMO), ImportError, "Torchvision", "torchvision")
    return seen(fault, "the processor was loaded without torchvision")


I11_NO_SPLIT_SET = Bug(
    title="accelerate takes transformers' set of classes that must not be split for one name, and splits them",
    symptom="silent: the map cuts decoder layers in two; with Gemma 4 what is cut loses its buffers (C8)",
    trigger="infer_auto_device_map or get_balanced_memory with no_split_module_classes=model._no_split_modules, "
    "which is a set in transformers 5",
    cause="accelerate utils/modeling.py wraps what is neither a list nor a tuple in a list, so that no class name is "
    "found in it",
    affected=(Affected("accelerate", fixed_in="1.14.0"),),
    versions="accelerate 1.13.0 run, splits; 1.15.0 run, does not; 1.14.0 has the fix (read in the wheel)",
    way_round="pass list(model._no_split_modules); PEFT and transformers do",
    trimtab="blocks are found in the model itself and moved as one piece",
    evidence="run",
)  # fmt: skip


def i11_no_split_set(kit: Kit) -> Seen:
    """Plan a tiny Llama within half of its size, with the classes as a list and as a set."""
    import torch
    import transformers
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    config = transformers.AutoConfig.from_pretrained(kit.checkpoint("llama"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    total_bytes = compute_module_sizes(model)[""]
    cut = {}
    for kind in (list, set):
        memory = {"cpu": total_bytes * 45 // 100, "disk": 10 * total_bytes}
        device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=kind(["LlamaDecoderLayer"]))
        cut[kind.__name__] = sum(name.startswith("model.layers.") and name.count(".") > 2 for name in device_map)
    text = f"keys below a decoder layer: {cut['list']} with a list of classes, {cut['set']} with a set"
    return Seen(PRESENT if cut["set"] > cut["list"] else FIXED, text)


I21_TABLE_SCALES = Bug(
    title="A Gemma 4 mobile checkpoint whose per-layer table has a scale for each layer is refused",
    symptom="RuntimeError: You set `ignore_mismatched_sizes` to `False`, after a table with embedding_scale | MISMATCH",
    trigger="a checkpoint with GemmaQuantizationConfig and quantize_embeddings whose embedding_scale is [rows, n], n above 1",
    cause="integrations/gemma_quant.py QuantizedEmbedding makes embedding_scale [rows, 1]; _dequantize_weights takes several",
    affected=(Affected("transformers", since="5.12.0"),),
    versions="transformers 5.23.0, run; 5.12.0 has the class, 5.8.0 has not (read)",
    way_round="load with the first scale of each row, then set embedding_scale to the file's own tensor",
    trimtab="it reads such tables (mobile4-g256 in a plan)",
    evidence="run",
)  # fmt: skip


def i21_table_scales(kit: Kit) -> Seen:
    """Load a model of one layer whose table has two scales a row."""
    import torch
    import transformers

    if not hasattr(transformers, "GemmaQuantizationConfig"):
        return Seen(NOT_APPLICABLE, "transformers has no GemmaQuantizationConfig")
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    state = dict(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).state_dict())
    del state["model.embed_tokens.weight"]
    state["model.embed_tokens.embedding_quantized"] = torch.ones(8, 16, dtype=torch.int8)
    state["model.embed_tokens.embedding_scale"] = torch.ones(8, 2)
    settings = {
        "quant_method": "gemma", "num_bits": 8, "quantize_embeddings": True, "modules_to_not_convert": ["model.layers", "lm_head"],
    }  # fmt: skip
    config = transformers.LlamaConfig(**sizes, quantization_config=settings)
    load = partial(transformers.LlamaForCausalLM.from_pretrained, None, config=config, state_dict=state)
    return seen(error_of(load, RuntimeError, "mismatched_sizes"), "a table with two scales a row was loaded")
