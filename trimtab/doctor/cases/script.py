"""A script that reproduces a case on a tiny model with the stock stack only, and prints the result.

It builds a small Gemma 4 and an adapter with transformers and PEFT, needs no download and does not import trimtab.
Without a GPU, `torch.device("cpu")` imitates one. It ends with a line that begins "RESULT: ", after the exception if
there is one. Pure: only text is made here.
"""

from __future__ import annotations

from typing import Any

from trimtab.doctor.cases.cases import BROAD_TARGETS, GEMMA4, Case, device_map, skip_modules

LINE_CHARS = 90
_PROJECTION = r"(q|k|v|o|gate|up|down)_proj"
LANGUAGE = rf"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.{_PROJECTION}"
TOWERS = (
    rf"model\.vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.{_PROJECTION}\.linear"
    r"|model\.audio_tower\.layers\.\d+\.self_attn\.(q|k|v)_proj\.linear"
)

# A small Gemma 4 with all parts of a real one.
CONFIG = """\
config = Gemma4Config(
    text_config=dict(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, global_head_dim=64, layer_types=[sliding, sliding, full, sliding, full],
        num_kv_shared_layers=2, sliding_window=8, hidden_size_per_layer_input=64, vocab_size_per_layer_input=320,
        use_double_wide_mlp=True, max_position_embeddings=512, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    vision_config=dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, patch_size=8, pooling_kernel_size=2, position_embedding_size=64, use_clipped_linears=True,
    ),
    audio_config=dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, output_proj_dims=128,
        subsampling_conv_channels=[128, 4], attention_chunk_size=4, attention_context_left=5,
    ),
    image_token_id=319, audio_token_id=318, boi_token_id=317, eoi_token_id=316, video_token_id=315,
)
"""

HEAD = (
    '''\
"""{name}: {title}."""
import json
import pathlib
import tempfile
import traceback
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig, Gemma4Config, Gemma4ForConditionalGeneration

work = pathlib.Path(tempfile.mkdtemp())
# Without a GPU, torch.device("cpu") plays it: accelerate takes the string "cpu" for another device, and offloads to it.
gpu = 0 if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
sliding, full = "sliding_attention", "full_attention"
'''
    + CONFIG
    + """\
Gemma4ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(work / "base")
"""
)

ADAPTER = """
plain = Gemma4ForConditionalGeneration.from_pretrained(work / "base", dtype=torch.bfloat16)
targets = {targets!r}
lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(plain, lora).save_pretrained(work / "adapter")
"""

RETARGET = """\
path = work / "adapter" / "adapter_config.json"
path.write_text(json.dumps({{**json.loads(path.read_text()), "target_modules": {targets!r}}}))
"""

DISK = """
if gpu != 0:  # safetensors takes the name of a device, not the object that plays the GPU here
    import accelerate.utils.offload as offload

    plain_open = offload.safe_open
    offload.safe_open = lambda *a, device="cpu", **k: plain_open(*a, device=str(device), **k)
"""

PRESSURE = """
    # What accelerate would read off a card that the loaded base fills to {percent} %.
    import accelerate.utils.modeling as modeling

    resident = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    free = int(0.9 * resident * {ratio:.4f})
    modeling.get_max_memory = lambda max_memory=None: {{gpu: free, "cpu": 2**36}}
"""

AUTO = """
if gpu != 0:  # the memory of the GPU that the CPU plays
    import accelerate.utils.modeling as modeling
    import transformers.integrations.accelerate as integration

    modeling.get_max_memory = lambda m=None: {gpu: int(resident * SHARE), "cpu": 2**36}
    integration.accelerate_max_memory = modeling.get_max_memory
"""

ASK = """
    text = torch.arange(3, 15).unsqueeze(0)
    device = "cuda" if gpu == 0 else "cpu"
    stage = "first forward"
    with torch.no_grad():
        modes["text"] = model(input_ids=text.to(device)).logits[0, -1].float().cpu()
        features = torch.randn(1, 32, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        ids = torch.cat([text[:, :4], torch.full((1, 8), 318), text[:, 4:]], 1)
        modes["audio"] = model(
            input_ids=ids.to(device), input_features=features.to(device),
            input_features_mask=torch.ones(1, 32, dtype=torch.bool, device=device),
            mm_token_type_ids=3 * (ids == 318).long().to(device),
        ).logits[0, -1].float().cpu()
        stage = "generate"
        print("generated:", tuple(model.generate(input_ids=text.to(device), max_new_tokens=4, do_sample=False).shape))
    stage = "done"
"""

END = """\
except Exception as error:
    trace = traceback.extract_tb(error.__traceback__)
    for frame in trace[-8:]:
        print(" ", "/".join(pathlib.Path(frame.filename).parts[-3:]), frame.lineno, frame.name)
    print(f"RESULT: {type(error).__name__} at {stage}: {str(error).splitlines()[0] if str(error) else ''}")
else:
    print("map after:", getattr(model, "hf_device_map", None))
    print("4-bit or 8-bit layers:", sum(type(m).__name__ in ("Linear4bit", "Linear8bitLt") for m in model.modules()))
    print("RESULT: no exception;", {mode: round(float(logits.sum()), 2) for mode, logits in modes.items()})
"""


def script_of(case: Case) -> str:
    """Return the script of a case. The bridge's cases show the stock call instead."""
    parts = [HEAD.format(name=case.name, title=case.title)]
    if case.needs_adapter:
        parts.append(ADAPTER.format(targets=f"{LANGUAGE}|{TOWERS}"))
        if case.adapter in ("broad", "original"):
            parts.append(RETARGET.format(targets=list(BROAD_TARGETS)))
        elif case.adapter == "narrow":
            parts.append(RETARGET.format(targets=LANGUAGE))
    if "disk" in case.base_map:
        parts.append(DISK)
    if case.gpu_share is not None:
        parts.append('\nresident = sum(f.stat().st_size for f in (work / "base").glob("*.safetensors"))')
        parts.append(AUTO.replace("SHARE", str(case.gpu_share / 2)))
    parts.append('\nmodel, modes, stage = None, {}, "base"\ntry:\n' + _indented(_load(case)))
    if case.pressure is not None:
        parts.append(PRESSURE.format(percent=round(100 * case.pressure), ratio=(1 - case.pressure) / case.pressure))
    parts.append(_indented(_adapt(case) + _then(case)))
    parts.append(ASK + END)
    return "".join(parts)


def _load(case: Case) -> list[str]:
    options = ["    dtype=torch.bfloat16,", f"    device_map={_map(device_map(case.base_map, GEMMA4))},"]
    options += [f"    {name}={value!r}," for name, value in case.load.items() if name != "offload_folder"]
    if case.gpu_share is not None:
        options.append(f'    max_memory={{0: int(resident * {case.gpu_share / 2}), "cpu": 2**36}},')
    if "disk" in case.base_map or "offload_folder" in case.load:
        options.append('    offload_folder=work / "offload",')
    if case.quant != "none":
        fields = {"load_in_8bit": "True"} if case.quant == "int8" else {
            "load_in_4bit": "True", "bnb_4bit_quant_type": '"nf4"', "bnb_4bit_use_double_quant": str(case.quant == "nf4-dq"),
            "bnb_4bit_compute_dtype": "torch.bfloat16",
        }  # fmt: skip
        fields["llm_int8_enable_fp32_cpu_offload"] = "True"
        if case.keep:
            fields["llm_int8_skip_modules"] = repr(skip_modules(GEMMA4))
        options.append("    quantization_config=BitsAndBytesConfig(")
        options += [f"        {name}={value}," for name, value in fields.items()]
        options.append("    ),")
    return [
        "model = Gemma4ForConditionalGeneration.from_pretrained(", '    work / "base",', *options, ").eval()",
        'print("loaded:", getattr(model, "hf_device_map", None))',
    ]  # fmt: skip


def _adapt(case: Case) -> list[str]:
    if case.call == "none":
        return []
    lines = ['stage = "adapter"']
    if case.call == "dispatch":
        return [
            *lines, "from accelerate import dispatch_model", "",
            f"model = dispatch_model(model, device_map={_map(device_map(case.peft_map, GEMMA4))})",
        ]  # fmt: skip
    if case.call == "native":
        return [*lines, 'model.load_adapter(str(work / "adapter"))']
    if case.call == "dequantize, peft":
        lines.append("model = model.dequantize()")
    arguments = [f"    {name}={_argument(name, value)}," for name, value in case.peft.items()]
    if case.peft_map:
        arguments.append(f"    device_map={_map(device_map(case.peft_map, GEMMA4))},")
    return [*lines, "model = PeftModel.from_pretrained(", '    model, work / "adapter",', *arguments, ").eval()"]


def _argument(name: str, value: Any) -> str:
    special = {"offload_dir": 'work / "peft-offload"', "torch_device": '"cuda:0" if gpu == 0 else "cpu"'}
    return special.get(name, repr(value))


def _then(case: Case) -> list[str]:
    if not case.then:
        return []
    lines = ['stage = "merge"']
    if case.then.startswith("dequantize"):
        lines.append("model.dequantize()")
    return [
        *lines, "with warnings.catch_warnings(record=True) as said:", '    warnings.simplefilter("always")',
        "    model = model.merge_and_unload()", 'print(len(said), "warnings")',
    ]  # fmt: skip


def _map(device_map: Any) -> str:
    """Return a map as Python text in which 0 is the name of the imitated GPU; one entry per line if it is long."""
    if isinstance(device_map, str):
        return repr(device_map)
    entries = [f"{key!r}: {'gpu' if place == 0 else repr(place)}" for key, place in device_map.items()]
    one_line = f"{{{', '.join(entries)}}}"
    if len(one_line) <= LINE_CHARS:
        return one_line
    return "{\n" + "".join(f"        {entry},\n" for entry in entries) + "    }"


def _indented(lines: list[str]) -> str:
    return "".join(f"    {part}\n" if part else "\n" for line in lines for part in line.split("\n"))
