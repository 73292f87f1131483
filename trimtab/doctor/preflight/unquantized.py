"""Which linears does the stock stack leave unquantized, and how many bytes has each tensor of the loaded model?"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.checkpoint.anatomy import DTYPE_BYTES, ModuleRow
from trimtab.doctor.preflight.shape import ModelShape
from trimtab.formats.record import packed_bytes

STACKED = "stacked experts: bitsandbytes has no format for 3-D weights"


def stock_kept(shape: ModelShape, *, takes_map: bool) -> dict[str, str]:
    """Return module_path -> reason of the linears that the stock stack leaves unquantized.

    takes_map: whether the map's CPU and disk keys count (llm_int8_enable_fp32_cpu_offload with a map as a dict).
    """
    if shape.quant == "none":
        return {}
    left = [row for row in shape.anatomy.rows if row.why_unquantized]
    reasons = {row.module_path: STACKED if row.kind == "experts" else row.why_unquantized for row in left}
    # In a packed checkpoint, packed weights stay packed with any map.
    if takes_map and shape.anatomy.prequantized is None:
        for path, key in shape.skipped_by_key.items():
            reasons.setdefault(path, f"the map's key {key!r} is on the CPU or disk")
    return reasons


def quantized_paths(shape: ModelShape, kept: Mapping[str, str]) -> frozenset[str]:
    """Return the linears whose weight the stock stack quantizes."""
    return frozenset(row.module_path for row in shape.anatomy.rows if row.quantized and row.module_path not in kept)


def weight_bytes(row: ModuleRow, kind: str) -> int:
    """Return the bytes of a linear's weight in a format, including scales."""
    weight = row.weight
    return 0 if weight is None else packed_bytes(weight.shape, kind, weight.dtype)


def stock_bytes(shape: ModelShape, quantized: frozenset[str]) -> dict[str, int]:
    """Return tensor_path -> its exact bytes in the loaded stock model, including scales; without tied copies."""
    rows, sizes = shape.anatomy.by_path(), {}
    for module in shape.modules:
        for own in module.tensors:
            if own.tied_to is not None:
                continue
            size = own.numel * DTYPE_BYTES.get(own.dtype, 4)
            if own.name == "weight" and module.module_path in quantized:
                size = weight_bytes(rows[module.module_path], shape.quant)
            sizes[f"{module.module_path}.{own.name}".lstrip(".")] = size
    return sizes
