"""Which bugs of other packages are known? One file each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

# In reading order. A test finds files that are missing here.
FILES: tuple[str, ...] = (
    "a1_meta_item",
    "a2_4bit_meta_copy",
    "a3_hf_initialized",
    "a4_cpu_not_quantized",
    "a5_nothing_quantized",
    "a6_auto_map_quantizes_cpu_layers",
    "a7_int8_detach",
    "a8_cpu_packing",
    "a9_cpu_rows",
    "b1_map_discarded",
    "b2_replan_double_count",
    "b3_peft_map_keys",
    "b4_shared_kv",
    "b5_disk_adapter",
    "b6_cwd_copy",
    "b7_offload_kwargs",
    "b8_wrong_device",
    "b9_native_load",
    "c1_catchall_disk",
    "c2_merge_drops_offloaded",
    "c3_save_sequential",
    "c4_catchall_peak",
    "c5_unknown_keys",
    "c6_prefix_collision",
    "c7_device_objects",
    "c8_layer_scalar",
    "d1_clippable",
    "d2_audio_finfo",
    "d3_sdpa_audio",
    "d4_embed_offload",
    "d5_cross_device",
    "d6_ple",
    "e1_missing_keys",
    "e2_missing_lowmem",
    "e3_extra_keys",
    "e4_servers",
    "f1_4bit_merge",
    "f2_dequant_merge",
    "f3_other_backends",
    "f4_merge_memory",
    "f5_safe_merge_bias",
    "g1_tied",
    "g2_windows",
    "h1_quantized_blind",
    "h2_vision_fp32",
    "h3_experts_unquantized",
    "h4_skip_list_replaces",
    "h5_moe_prequantized",
    "h6_request_state",
    "i1_window_zero",
    "i2_moe_lora_load",
    "i3_moe_targets",
    "i4_int8_dora_scale",
    "i5_lora_only_bias",
    "i6_save_by_ending",
    "i7_per_layer_attribute",
    "i8_late_streamer",
    "i9_processor_torchvision",
    "i10_merge_bias_scale",
    "i11_no_split_set",
    "i12_cudnn_attention",
    "i13_one_key_head",
    "i14_frozen_last_token",
    "i15_graph_pool",
    "i16_row_scales",
    "i17_snapshot_references",
    "i18_fp8_blocks",
    "i19_packed_linear",
    "i20_gguf_linear",
    "i21_table_scales",
    "i22_fp8_linear",
    "i23_nvfp4_linear",
)


def read_entry(path: Path) -> ModuleType:
    """Return the module of one catalogue file: its `BUG` and its `probe`."""
    spec = importlib.util.spec_from_file_location(f"trimtab.doctor.catalogue.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
