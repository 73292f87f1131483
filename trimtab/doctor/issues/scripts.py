"""Minimal reproducers: one script per failure. It needs only the stock stack and first runs a similar case that passes.

A script is a body of a few lines after the shared parts that it uses: a tiny random Gemma 4, its loader, a LoRA for its
language model. Failures that do not depend on Gemma 4 are shown on a tiny Llama, without an adapter. A script prints
"works: ..." for the similar case, then raises the user's exception; a silent failure ends in an AssertionError that
reports it.
"""

from __future__ import annotations

import re

from trimtab.doctor.cases.script import CONFIG

GPU = """\
# Without a GPU, torch.device("cpu") stands for it: accelerate treats the string "cpu" as another device, and offloads.
gpu = 0 if torch.cuda.is_available() else torch.device("cpu")
"""

GEMMA4 = (
    """\
full, sliding = "full_attention", "sliding_attention"
"""
    + CONFIG
    + """\
torch.manual_seed(0)
folder = tempfile.mkdtemp()
Gemma4ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder + "/base")
"""
)

LOAD = """

def load(device_map, quantize=True, **options):
    if quantize:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False,
            bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_enable_fp32_cpu_offload=True,
        )
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder + "/base", dtype=torch.bfloat16, device_map=device_map, **options
    )
"""

LOAD_PLAIN = """

def load(device_map, **options):
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder + "/base", dtype=torch.bfloat16, device_map=device_map, **options
    )
"""

LOGITS = """

@torch.no_grad()
def logits(model, **inputs):
    model.eval()
    inputs = inputs or {"input_ids": torch.arange(5, 13)[None]}
    return model(**{name: value.to(gpu) for name, value in inputs.items()}).logits.cpu()
"""

MAKE_ADAPTER = """

def make_adapter(name, targets):
    plain = Gemma4ForConditionalGeneration.from_pretrained(folder + "/base", dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    get_peft_model(plain, lora).save_pretrained(folder + "/" + name)
    return folder + "/" + name
"""

EXPLICIT = '''

def explicit(offloaded, prefix="base_model.model."):
    """One entry a module and no catch-all, in PEFT's names: what is named goes to the CPU, the rest to the GPU."""
    text = ["embed_tokens", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm", "norm",
            "rotary_emb", *(f"layers.{i}" for i in range(5))]
    names = ["lm_head", "model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio",
             *("model.language_model." + name for name in text)]
    return {prefix + name: "cpu" if name in offloaded else gpu for name in names}
'''

# By the name that needs it, in the order of a script.
PIECES = (
    ("gpu", GPU), ("folder", GEMMA4),
    ("LANGUAGE", 'LANGUAGE = r".*language_model\\.layers\\.\\d+\\.(self_attn|mlp)\\.(q|k|v|o|gate|up|down)_proj"\n'),
    ("TOWERS_OFF", 'TOWERS_OFF = {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": gpu}\n'),
    ("load", LOAD), ("make_adapter", MAKE_ADAPTER), ("logits", LOGITS), ("explicit", EXPLICIT),
)  # fmt: skip
IMPORTED = {
    "accelerate": ("dispatch_model",), "peft": ("LoraConfig", "PeftModel", "get_peft_model"),
    "transformers": (
        "BitsAndBytesConfig", "Gemma4Config", "Gemma4ForConditionalGeneration", "LlamaConfig", "LlamaForCausalLM",
    ),
}  # fmt: skip

_TOWERS = '["model.vision_tower", "model.audio_tower"]'

_LAYER = """\
folder = tempfile.mkdtemp()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=DOUBLE_QUANT, bnb_4bit_compute_dtype=torch.bfloat16
)


def load():
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": gpu}, quantization_config=quantization
    )


ids = torch.arange(5, 13)[None].to(gpu)
with torch.no_grad():
    print("works: all on the GPU, logits", tuple(load()(ids).logits.shape))
    # The second of the two 4-bit decoder layers on the CPU.
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    model = dispatch_model(load(), device_map={**dict.fromkeys(names, gpu), "model.layers.1": "cpu"})
    print("loaded: one 4-bit layer on the CPU")
    model(ids)
"""

_REPLAN = '''
def tower_weights(model):
    """How many weights of the vision tower are offloaded (on meta between forwards), of how many."""
    weights = [value for name, value in model.named_parameters() if ".vision_tower." in name and "lora_" not in name]
    return sum(weight.device.type == "meta" for weight in weights), len(weights)


adapter = make_adapter("adapter", LANGUAGE)
base = load(TOWERS_OFF)
print("works: the split base alone, logits", tuple(logits(base).shape))
before, total = tower_weights(base)
print(f"before: {before} of {total} vision tower weights offloaded, hf_device_map {base.hf_device_map}")
model = PeftModel.from_pretrained(base, adapterMAP)
after, total = tower_weights(model)
print(f"after: {after} of {total} vision tower weights offloaded, hf_device_map {model.hf_device_map}")
assert after == before, f"{before} of {total} vision tower weights were offloaded before the adapter, {after} after it"
'''

_MERGE = """
adapter = make_adapter("adapter", LANGUAGE)
plain = logits(load({"": gpu}))
model = PeftModel.from_pretrained(load({"": gpu}, quantize=False), adapter)
wanted = logits(model)
merged = logits(model.merge_and_unload())
print(f"works: bf16, |merged - adapter| {(merged - wanted).abs().max():.4f}")

# A fresh load before the merge: a forward on a CPU may repack 4-bit weights.
wanted = logits(PeftModel.from_pretrained(load({"": gpu}), adapter))
merged = logits(PeftModel.from_pretrained(load({"": gpu}), adapter).merge_and_unload())
far, farther = (merged - wanted).abs().max(), (wanted - plain).abs().max()
print(f"NF4: |merged - adapter| {far:.4f}, |adapter - base| {farther:.4f}")
assert torch.equal(merged.argmax(-1), wanted.argmax(-1)), "the merged 4-bit model chooses other tokens than the adapter"
"""

SCRIPTS: dict[str, str] = {
    "layer-double-quant": _LAYER.replace("DOUBLE_QUANT", "True"),
    "layer-single-quant": _LAYER.replace("DOUBLE_QUANT", "False"),
    "re-plan": _REPLAN.replace("MAP", ""),
    "map-ignored": _REPLAN.replace("MAP", ", device_map=TOWERS_OFF"),
    "map-refused": '''
adapter = make_adapter("adapter", LANGUAGE)
named = {"model.language_model": gpu, "model.embed_vision": gpu, "model.embed_audio": gpu, "lm_head": gpu,
         "model.vision_tower": "cpu", "model.audio_tower": "cpu"}
base = load(named)
print("works: the base with this map, logits", tuple(logits(base).shape))
PeftModel.from_pretrained(base, adapter, device_map=named)
''',
    "shared-kv": '''
adapter = make_adapter("adapter", LANGUAGE)
base = load(TOWERS_OFF)
print("works: the split base alone, logits", tuple(logits(base).shape))
model = PeftModel.from_pretrained(base, adapter, device_map=TOWERS_OFF)
logits(model)
''',
    "disk": '''
adapter = make_adapter("adapter", LANGUAGE)
device = 0 if torch.cuda.is_available() else "cpu"
named = {"model.language_model": device, "model.embed_vision": device, "model.embed_audio": device, "lm_head": device,
         "model.audio_tower": device, "model.vision_tower": "disk"}
base = load(named, quantize=False, offload_folder=folder + "/offload")
print("works: the base with one tower on disk, logits", tuple(logits(base).shape))
model = PeftModel.from_pretrained(base, adapter, offload_folder=folder + "/offload_adapter")
logits(model)
''',
    "offload-folder": '''
adapter = make_adapter("adapter", LANGUAGE)
device = 0 if torch.cuda.is_available() else "cpu"
base = load(TOWERS_OFF, quantize=False, offload_folder=folder + "/offload")
print("works: the split base with an offload_folder, logits", tuple(logits(base).shape))
to_disk = {"base_model.model.model." + name: device for name in ("language_model", "embed_vision", "embed_audio", "audio_tower")}
to_disk |= {"base_model.model.lm_head": device, "base_model.model.model.vision_tower": "disk"}
PeftModel.from_pretrained(base, adapter, device_map=to_disk)
''',
    "native-load": '''
adapter = make_adapter("adapter", LANGUAGE)
base = load(explicit(["model.language_model.layers.1"], prefix=""), quantize=False)
print("works: the base with one decoder layer on the CPU, logits", tuple(logits(base).shape))
base.load_adapter(adapter)
logits(base)
''',
    "catch-all-disk": '''
device = 0 if torch.cuda.is_available() else "cpu"
named = {"model.language_model": device, "model.embed_vision": device, "model.embed_audio": device, "lm_head": device,
         "model.audio_tower": device, "model.vision_tower": "disk"}
base = load(named, quantize=False, offload_folder=folder + "/offload")
print("works: every module named, logits", tuple(logits(base).shape))
load({"model.vision_tower": "disk", "": gpu}, quantize=False, offload_folder=folder + "/offload")
''',
    "merge-drops": f'''
adapter = make_adapter("adapter", r".*vision_tower.*self_attn\\.(q|v)_proj\\.linear")
towers = {_TOWERS}


def merged_share(device_map):
    """The share of offloaded target weights that merge_and_unload changed."""
    model = PeftModel.from_pretrained(load(TOWERS_OFF, quantize=False), adapter, device_map=device_map)
    model = model.merge_and_unload()
    plain = load(None, quantize=False)
    ends = ("q_proj.linear", "v_proj.linear")
    targets = [name for name, _ in plain.named_modules() if "vision_tower" in name and name.endswith(ends)]
    changed = 0
    for name in targets:
        hook = model.get_submodule(name)._hf_hook
        weight = getattr(hook, "hooks", [hook])[-1].weights_map["weight"]
        changed += not torch.equal(weight.cpu(), plain.get_submodule(name).weight.cpu())
    return changed, len(targets)


changed, total = merged_share(explicit(towers))
print(f"works: without a catch-all, {{changed}} of {{total}} weights merged")
prefixed = {{"base_model.model." + name if name else "": device for name, device in TOWERS_OFF.items()}}
changed, total = merged_share(prefixed)
assert changed == total, f"with a catch-all, {{changed}} of {{total}} weights merged"
''',
    "clippable": r'''
base = load({"": gpu})
inner = r".*vision_tower.*self_attn\.(q|v)_proj\.linear"
model = get_peft_model(base, LoraConfig(r=4, target_modules=inner))
print("works: the inner .linear as target, logits", tuple(logits(model).shape))
get_peft_model(load({"": gpu}), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
''',
    "audio-finfo": '''
sound = {"input_ids": torch.tensor([[5, 6] + [318] * 10 + [7, 8]]), "input_features": torch.randn(1, 40, 128),
         "input_features_mask": torch.ones(1, 40, dtype=torch.bool)}
print("works: bf16 with sound, logits", tuple(logits(load({"": gpu}, quantize=False), **sound).shape))
quantized = load({"": gpu})
print("works: 4-bit without sound, logits", tuple(logits(quantized).shape))
logits(quantized, **sound)
''',
    "sdpa": '''
print("works: no attn_implementation, logits", tuple(logits(load({"": gpu}, quantize=False)).shape))
load({"": gpu}, quantize=False, attn_implementation="sdpa")
''',
    "embed-offload": '''
named = {"model.language_model": gpu, "model.embed_vision": gpu, "model.embed_audio": gpu, "lm_head": gpu,
         "model.vision_tower": "cpu", "model.audio_tower": "cpu"}
print("works: towers on the CPU, logits", tuple(logits(load(named, quantize=False)).shape))
text = ["embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm", "norm", "rotary_emb", "layers"]
parts = {name: device for name, device in named.items() if name != "model.language_model"}
parts |= {"model.language_model." + name: gpu for name in text} | {"model.language_model.embed_tokens": "cpu"}
logits(load(parts, quantize=False))
''',
    "extra-keys": '''
import json
import os
import shutil
import warnings

vision = r".*vision_tower.*self_attn\\.(q|v)_proj\\.linear"
whole = make_adapter("whole", f"({LANGUAGE})|({vision})")
# The same weights; the config names the language model alone.
narrow = shutil.copytree(whole, folder + "/narrow")
with open(os.path.join(narrow, "adapter_config.json")) as file:
    adapter_config = json.load(file)
with open(os.path.join(narrow, "adapter_config.json"), "w") as file:
    json.dump({**adapter_config, "target_modules": LANGUAGE}, file)


def loaded(path):
    model = PeftModel.from_pretrained(load({"": gpu}, quantize=False), path)
    return sum("lora_" in name for name, _ in model.named_parameters())


total = loaded(whole)
print(f"works: the config names both parts, {total} tensors loaded")
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    found = loaded(narrow)
told = any("unexpected" in str(one.message).lower() for one in heard)
assert told or found == total, f"{found} of {total} tensors of the file loaded, without a warning"
''',
    "unknown-key": '''
print("works: logits", tuple(logits(load(TOWERS_OFF, quantize=False)).shape))
model = load({**TOWERS_OFF, "model.multi_modal_projector": "cpu"}, quantize=False)
print("hf_device_map", model.hf_device_map)
assert "model.multi_modal_projector" not in model.hf_device_map, "a key that names no module was accepted"
''',
    "nothing-quantized": '''
from bitsandbytes.nn import Linear4bit


def quantized(model):
    return sum(isinstance(module, Linear4bit) for module in model.modules())


print("works: all on the GPU,", quantized(load({"": gpu})), "4-bit layers")
model = load({"": "cpu"})
found = quantized(model)
assert found or not model.is_loaded_in_4bit, f"{found} 4-bit layers, is_loaded_in_4bit {model.is_loaded_in_4bit}"
''',
    "merge-4bit": _MERGE,
    "dequantize-merge": '''
adapter = make_adapter("adapter", LANGUAGE)
base = load({"": gpu}).dequantize()
PeftModel.from_pretrained(base, adapter).merge_and_unload()
print("works: dequantize, then load the adapter, then merge")
model = PeftModel.from_pretrained(load({"": gpu}), adapter)
model.dequantize()
model.merge_and_unload()
''',
}  # fmt: skip


def script(name: str) -> str:
    """Return the whole text of one reproducer: its imports, the shared parts that it uses, its body."""
    body = SCRIPTS[name].strip("\n") + "\n"
    own_imports, body = _split_imports(body)
    is_plain = len(_uses("load", body)) == body.count("quantize=False")
    if is_plain:
        body = body.replace(", quantize=False", "")
    pieces: list[str] = []
    # In reverse order: a part may need earlier ones.
    for needed, text in reversed(PIECES):
        is_made = re.search(rf"^({needed} = |def {needed}\()", body, re.M) is not None
        if not is_made and _uses(needed, "".join((*pieces, body))):
            pieces.insert(0, LOAD_PLAIN if is_plain and text is LOAD else text)
    whole = "".join(pieces).rstrip("\n")
    # A definition before or after the boundary needs two empty lines.
    is_wide = body.startswith(("def ", "class ")) or whole.rpartition("\n")[2].startswith(" ")
    return f"{_imports(own_imports, whole + body)}\n{whole}\n{chr(10) * (2 if is_wide else 1)}{body}"


def _uses(name: str, text: str) -> list[str]:
    """Return where a text uses a shared part: a function's calls, a constant's name; never an attribute of that name."""
    end = r"\(" if any(f"def {name}(" in piece for _, piece in PIECES) else r"\b"
    return re.findall(rf"(?<![.\w\"]){name}{end}", text)


def _split_imports(body: str) -> tuple[list[str], str]:
    lines = body.splitlines(keepends=True)
    count = 0
    while lines[count].startswith(("import ", "from ")) or not lines[count].strip():
        count += 1
    return [line.strip() for line in lines[:count] if line.strip()], "".join(lines[count:])


def _imports(own: list[str], text: str) -> str:
    """Return the import lines of a script: those of its body and those for the names in its text."""
    standard = sorted({*(line for line in own if line.startswith("import ")), "import tempfile"})
    kept = [line for line in own if line.startswith("from ")]
    for package, names in IMPORTED.items():
        used = [name for name in names if re.search(rf"\b{name}\b", text)]
        if used:
            kept.append(f"from {package} import {', '.join(used)}")
    return "\n".join((*standard, "", "import torch", *sorted(kept))) + "\n"
