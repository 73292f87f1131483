"""In which words do people report each bug of the catalogue?"""

from __future__ import annotations

_BITS = r"[48].?bits?|int[48]|nf4|fp4|qlora|quanti|bnb|bitsandbytes|load_in"
_LORA = r"q?lora|adapter|peft"
_MERGED = r"merg|unload"
_MEMORY = r"memory|oom|out.of.memory|c?p?u?.?ram\b|vram|swap|killed"
_OTHER = (
    r"differ|wrong|worse|degrad|gibberish|garbage|nonsens|inconsisten|incorrect|mismatch|not.{0,8}same|chang|broken|poor|bad\b|diverg"
    r"|rounding|quality|ruin"
)
_NOTHING = (
    r"no.?op|no.{0,8}(effect|impact|differen|change)|ignor|silent|nothing|not.{0,12}(load|appl|activ|work|affect|tak)|unchanged"
    r"|without.{0,8}effect|(same|identical).{0,60}base|base.{0,60}(same|identical|output|answer|respon)"
)
_FAILED = r"error|fail|crash|cannot|can.t\b|unable|not.{0,8}support|unsupport|\w*error|broke"
_SPLIT = r"offload|dispatch|device_map|cpu|disk|split|multi.?gpu|devices"
_LOST = r"los[et]|drop|silent|miss|not.{0,9}(merg|appl)|no.effect|unchang|ignor"
_MOE = r"\w*moe|mixture|experts?|mixtral|gpt.?oss|deepseek|gate_up_proj"
_GEMMA = r"gemma.{0,3}(4|3n)"
_ABSENT = r"missing|renam|not.{0,9}(load|match|map|found)|random|fresh|newly|uninitial|discard"
_TABLE = r"embed_tokens|per.?layer.{0,2}embed|ple\b"

# A line is patterns between spaces: each begins a word, or a part of a name, in the same few sentences; capitals do not matter.
REPORTED: dict[str, tuple[str, ...]] = {
    "A1": ("double.?quant|nested offload|meta", "as_dict meta|item|offset"),
    "A2": (f"quant_?state|params4bit|linear4bit meta {_SPLIT}", f"4.?bit offload|cpu_offload|sequential {_FAILED}|meta"),
    "A3": ("_?is_hf_initialized",),
    "A4": (
        r"offload|cpu\b not.{0,15}quant|unquanti|full.precision|fp32|float32 4.?bit|8.?bit"
        r" modules|layers|weights memory|kept|keep|silent|stay",
    ),
    "A5": ("is_loaded_in_4bit cpu|no", r"cpu no.{0,12}(linear|layer|module).{0,20}(quanti|found|replac) 4.?bit|8.?bit|eetq"),
    "A6": ("device_map auto quanti|4.?bit|8.?bit cpu|offload meta|item",),
    "A7": ("scb offload|hook|detach|remov", "int8|8.?bit hook|offload remov|detach|re.?dispatch"),
    "A8": (f"avx.?512|cpu packed|packing|repack|dequant|state_dict|merg 4.?bit|nf4 {_OTHER}",),
    "A9": ("block_n", "4.?bit cpu|avx.?512 divisible|multiple 32|out_features|outputs"),
    "B1": (
        f"{_LORA} device_map|offload|hf_device_map"
        " discard|overwr|overrid|undo|undone|reset|revert|not.{0,9}(respect|honou?r|kept)|lose|lost|replac",
    ),
    "B2": (
        f"{_LORA} insufficient.memory|no.modules.could.be.assigned",
        "peft|load_adapter|peftmodel|adapter max_memory|infer_auto_device_map|get_balanced_memory|free.memory|twice|double"
        f" cpu|offload|{_MEMORY}",
        f"{_LORA} load (everything|whole|all|entire|model|base).{{0,40}}cpu",
    ),
    "B3": (
        r"does.not.give.any.device base_model\.model",
        "peft|adapter|peftmodel device_map prefix|base_model|key match|name|device|prefix",
    ),
    "B4": ("shared_kv", f"{_GEMMA} keyerror 22|13|18|sliding|shar", f"{_GEMMA} shar kv|key {_SPLIT}"),
    "B5": (
        r"keyerror:..?base_model\.model",
        f"{_LORA} disk|offload_folder|offload_index|offload_dir|offloaded.module {_FAILED}|extend|key|index|names",
    ),
    "B6": (
        "cop(y|ies|ied)|duplicat cwd|current.(dir|folder|work)|working.dir offload|disk|base|checkpoint adapter|peft|lora|load",
    ),
    "B7": (f"offload_dir|offload_folder|offload_buffers|ephemeral_gpu {_LORA}|peftmodel ignor|need|miss|forg|pass|{_FAILED}",),
    "B8": (
        "lora_[ab] device same|differ|cpu|wrong|mat2|move",
        "load_adapter|adapter|lora_ device same|differ|wrong cpu offload|load_adapter|move",
    ),
    "B9": ("load_adapter offload|device_map|hook cpu|cuda|device|hook",), "C1": ("meta.device need.a.{0,2}value disk|offload",),
    "C2": (f"{_MERGED} offload|cpu_offload|disk|device_map {_LOST}",),
    "C3": ("sequentialhook|weights_map", f"save_pretrained|saving offload|cpu|device_map hook|{_FAILED}"),
    "C4": (f"device_map peak|spike|temporar|first|before|initial gpu|vram|cuda offload|cpu load {_MEMORY}",),
    "C5": (
        "device_map keys? match|ignor|unknown|typo|warn|submodule|exist|name",
        "device_map modules?|layers?|submodules? not.{0,9}(match|exist|found)|misspel|typo|wrong.name",
    ),
    "C6": ("device_map prefix|startswith|starts.with|substring|collid|collision layers?|block|module|embed",),
    "C7": (r"device\(type invalid", r"safetensor torch\.device disk|offload"),
    "C8": ("layer_scalar device|map|meta|split|infer", f"infer_auto_device_map {_GEMMA}|buffer|scalar|clip"),
    "D1": (
        r"\w*clippable",
        f"{_GEMMA} {_LORA}|unsloth|fine.?tun|target_modules target|wrapp|vision|audio|tower|linear"
        " not.support|unsupport|refus|reject|only.the.following",
    ),
    "D2": (f"finfo audio|{_GEMMA}|tower|uint8", f"{_GEMMA} audio {_BITS} {_FAILED}"),
    "D3": (f"{_GEMMA}|audio sdpa|scaled_dot|attn_implementation|attention.implementation {_FAILED}",),
    "D4": (f"{_TABLE}|input.embed {_GEMMA}|per.?layer offload|cpu|meta|disk {_FAILED}|meta|forward",),
    "D5": (f"{_GEMMA} same.device|differ.{{0,9}}device|two.devices|devices|mm_token_type multi|split|offload|cpu|device_map|cuda",),
    "D6": (f"{_TABLE} {_MEMORY}|gpu|offload|cpu|flash|ssd",),
    "E1": (
        "missing.adapter.keys", rf"{_LORA} {_ABSENT} keys?\b|state.?dict|prefix warn|silent|ignor|discard|base|effect|random",
        f"{_LORA} load weights|checkpoint random|fresh|newly|uninitial|re.?initial|untrained|silent",
    ),
    "E2": (f"low_cpu_mem_usage {_LORA}|load_adapter meta|nan|random|missing|uninitial|garbage|{_OTHER}",),
    "E3": (
        f"{_LORA} unexpected.?_?keys?|extra.keys|drop|discard|unused|skipp|ignor target_modules|config|tower|vision|audio"
        " weights?|tensors?|keys?",
    ),
    "E4": (
        rf"vllm|sglang|tgi\b|lmdeploy|ollama|serv {_LORA} {_NOTHING}"
        rf" language_model|multi.?modal|vision|\w*vl\b|gemma|mistral|wrapper|silent|ignored|zero",
        f"{_LORA} {_NOTHING} language_model wrapp|multi.?modal|prefix|silent",
    ),
    "F1": (f"{_MERGED} {_BITS}|dequanti {_OTHER}",),
    "F2": (f"dequanti {_MERGED}|peft|adapter|lora quant_state|attribute|{_FAILED}",),
    "F3": (f"hqq|quanto|torchao|gptq|awq|aqlm|eetq {_MERGED}|offload|disk|device_map {_LORA}|{_FAILED}|not.impl|no.attribute",),
    "F4": (f"{_MERGED} {_MEMORY}", "合并 内存|显存|爆|溢出"), "F5": (f"safe_merge bias|ambiguous|boolean|lora_bias|{_FAILED}",),
    "G1": (rf"tied?\b|tie_word|tying|lm_head|shares?.memory offload|disk save|shares?.memory|duplicat|{_FAILED}",),
    "G2": (f"windows|backslash|win(10|11|32) offload|disk|offload_folder path|folder|copy|slash|{_LORA}",),
    "H1": (
        f"{_BITS} image|vision|picture|visual|pixel {_GEMMA}|gemma"
        " ignor|blind|hallucin|wrong|not.see|can.t.see|same|garbage|nonsens|unrelated",
    ),
    "H2": (f"vision|siglip|tower float32|fp32|dtype|upcast gemma|{_BITS} slow|memory|{_BITS}",),
    "H3": (
        f"{_MOE} {_BITS} not.{{0,25}}(quanti|convert|replac)|unquanti|skip|full.precision|16.?bit|bf16|bfloat16|fused|3-?d\\b"
        rf"|nn\.?parameter|{_MEMORY}|silent",
    ),
    "H4": (
        "llm_int8_skip_modules|skip_modules|modules_to_not_convert lm_head|head|default|replac|clear|overr|overwr|tied|assert",
        "'?parameter'?.object.has.no.attribute.'(scb|cb)'",
    ),
    "H5": (
        f"{_MOE} pre.?quant|already.quant|bnb-4bit|quanti\\w*.{{0,12}}(checkpoint|model|weights) load|checkpoint"
        f" size|mismatch|shape|{_FAILED}",
    ),
    "H6": ("rope_deltas", r"qwen.{0,8}vl position|m?rope previous|stale|last|second|between|cache|state|reus"),
    "I1": ("num_kv_shared_layers", f"{_GEMMA} sliding cache|kv grow|{_MEMORY}|unbounded|full|unlimited"),
    "I2": ("distributed_operation|quantization_operation argument|unexpected", "weightconverter argument|unexpected|keyword"),
    "I3": (
        "paramwrapper", f"{_MOE} {_LORA} dora|lora_bias|target_parameters|rank_pattern|3-?d.param {_FAILED}|ignor|warn|work|match",
    ),
    "I4": (r"\w*dora 8.?bit|int8|load_in_8 error|nonetype|second|dtype|cpu",),
    "I5": ("lora_only bias|save|load|miss", f"bias {_LORA} not.{{0,9}}save|left.out|lost|missing save|reload|load"),
    "I6": ("modules_to_save norm|layernorm|input_layernorm|suffix|endswith|substring|unwanted|more.than|partial|ends",),
    "I7": ("ambiguousglobal|per.?layer.attribute", f"{_GEMMA} head_dim|attribute config|getattr|hasattr|vary|{_FAILED}"),
    "I8": (r"\w*stream(er|ing)? mps|apple|metal|macbook|m[1-4]\b late|delay|lag|behind|one.(token|step)|first",),
    "I9": (
        r"torchvision processor|autoprocessor|video|\w*processor requir|need|import|not.{0,4}found|depend|install|miss|without",
    ),
    "I10": ("lora_bias merg|unmerg scal|alpha|wrong|incorrect|off|bnb|4.?bit|8.?bit", "merg bias scal 4.?bit|8.?bit|bnb|lora_b"),
    "I11": ("_?no_split_module(s|_classes) set|split|cut|respect|honor|ignor|infer",),
    "I12": ("mha_graph", f"cudnn attention|sdpa|scaled_dot {_MEMORY}|leak|execut|graph|plan"),
    "I13": (
        f"{_GEMMA} e2b|mqa|one.(kv|key).head|memory.efficient|efficient.attention wrong|incorrect|garbage|differ|nan"
        " prompt|length|sdpa|attention|prefill",
    ),
    "I14": ("cpu first.token|prefill|lm_head|logits|matmul slow|latency bf16|bfloat16",),
    "I15": ("use_count", f"cuda.?graphs? pool|mempool captur|delet|reset|reus assert|internal|{_FAILED}"),
    "I16": (
        r"avx.?512|cpu 4.?bit|nf4|fp4|dequanti scales?|rows?|blocks?|shape|invalid.for.input"
        " wrong|incorrect|multiple|64|1152|4304|reshape|invalid",
    ),
    "I17": ("memory_snapshot|mempool|snapshot segfault|segmentation|sigsegv|core.dump|refcount|crash",),
    "I18": ("fp8|finegrained|float8 block|128|tile scales?|dequanti wrong|incorrect|divisible|pad|mismatch|multiple|partial",),
    "I19": (f"gemma mobile|quantizedlinear|packed|gemmaquant {_MERGED}|{_LORA}|dora {_FAILED}|size|float",),
    "I20": (r"gguf\w* peft|lora|adapter gguflinear|target.?modules? not.support|unsupport|error", "gguflinear"),
    "I21": (f"gemma|mobile embedding.?scale|per.?layer|scales {_FAILED}|mismatch|ignore_mismatched",),
    "I22": (f"fp8|float8 promotion|promote {_MERGED}|{_LORA}|dora|add", "promotion for float8"),
    "I24": (f"shared.?experts? {_LORA} glm|glm4_moe|glm.?4.5|routed|target_parameters",),
    "I23": (r"nvfp4\w* peft|lora|adapter|target.?modules? not.support|unsupport|error", "nvfp4linear"),
    "I25": (r"compressed.?tensors|w4a16|pack.quantized peft|lora|adapter attribute|attach|target.?modules?|error",),
}  # fmt: skip
