"""What do the kernels' shared memory and registers depend on in a format?"""

from __future__ import annotations

from dataclasses import dataclass

# That of the launch configurations that others are estimated from: bitsandbytes' 4-bit codes.
FIRST_LAYOUT = "nf4"


@dataclass(frozen=True)
class Layout:
    """What the kernels' shared memory and registers depend on in a format (the headers of formats in engine/kernels/cuda).

    block_bytes: of 64 values of a row. scales: of 64 values, 4 bytes each (`Format::QUADS`). has_zero: whether groups have zero
    points. first_bytes: of a table of codes, or of room for A x. pads: behind each row of a stage, up to few_rows rows of x and
    beyond. value_bytes: of one value with its scale, about. whole: values of which rows must be a multiple. rounds_inputs: adapters
    read another x than the product.
    """

    block_bytes: int = 32
    scales: int = 1
    has_zero: bool = False
    first_bytes: int = 65536
    pads: tuple[int, int] = (64, 32)
    few_rows: int = 4
    whole: int = 64
    value_bytes: float = 0.516
    rounds_inputs: bool = False

    @property
    def has_table(self) -> bool:
        """Whether values are looked up; else they are made of their bits."""
        return self.first_bytes == 65536


# By name: `StoredFormat.layout`.
LAYOUTS = {
    FIRST_LAYOUT: Layout(),
    "int4": Layout(first_bytes=32768, value_bytes=0.53), "int4-zp": Layout(has_zero=True, first_bytes=32768, value_bytes=0.54),
    "int4-2": Layout(scales=2, first_bytes=32768, value_bytes=0.5625),
    "int4-2-zp": Layout(scales=2, has_zero=True, first_bytes=32768, value_bytes=0.594),
    "fp8": Layout(block_bytes=64, first_bytes=32768, pads=(64, 64), few_rows=0, whole=256, value_bytes=1.0),
    "q4_0": Layout(first_bytes=32768, value_bytes=0.5625), "q4_1": Layout(scales=2, first_bytes=32768, value_bytes=0.625),
    "q8_0": Layout(block_bytes=64, first_bytes=32768, pads=(64, 64), few_rows=0, value_bytes=1.0625),
    "q4_k": Layout(first_bytes=32768, whole=256, value_bytes=0.5625),
    "q5_k": Layout(block_bytes=40, first_bytes=32768, whole=256, value_bytes=0.6875),
    "mobile2": Layout(block_bytes=16, first_bytes=32768, value_bytes=0.25, rounds_inputs=True),
    "mobile4": Layout(first_bytes=32768, value_bytes=0.5, rounds_inputs=True),
    "mobile8": Layout(block_bytes=64, first_bytes=32768, pads=(64, 64), few_rows=0, value_bytes=1.0, rounds_inputs=True),
    "nvfp4": Layout(first_bytes=32768, value_bytes=0.5625),
    "q6_k": Layout(block_bytes=48, scales=2, first_bytes=32768, whole=256, value_bytes=0.82),
}  # fmt: skip
