"""The kernels of prompts in passes of the vision and audio towers: 4-bit weights unpacked in one launch, LoRA added in two.

    ops = TowerOps(model, kernels, short)        # before anything is captured: it reserves memory that graphs read
    with ops.running(), towers.running(...): hf_model(**tensors)

A tower multiplies thousands of rows. bitsandbytes unpacks each of its weights in three launches, and PEFT adds a LoRA by float32
products over all of these rows. Here both are the kernels that prompt chunks use (dequantize.py), and an RMS norm is one
operation (fewer_ops.py). They run in every pass, captured or not, so the first pass of an image and its captured passes give the
same bits. An unpacked weight has bitsandbytes' bits, and the product over it is the same call. A LoRA's change is rounded where
PEFT rounds it, its sum in another order.

Not covered: layers that the CPU computes, weights that are not 4-bit, passes of transformers' own that run the decoder too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trimtab.engine.formats.matmul_table import MatmulTable
from trimtab.engine.kernels.dequantize import PromptKernels, is_read
from trimtab.engine.layers.leaves import HostLeaf, Leaf
from trimtab.engine.lora.fewer_ops import ShortOps
from trimtab.engine.lora.store import TOWERS

if TYPE_CHECKING:
    from trimtab.engine.layers.context import EngineContext


class TowerOps:
    """The operations of the passes of one model's towers. kernels, short: as chosen for its prompts."""

    def __init__(self, model: EngineContext, kernels: PromptKernels, short: ShortOps) -> None:
        self._kernels, self._short, self._store = kernels, short, model.adapter_store
        self.leaves = four_bit_towers(model)
        # No layer's input is kept in float32 for the next layer, whose graph must not read another graph's tensors.
        self.adapters = kernels.adapters(shares_inputs=False)
        kernels.reserve(self.leaves)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the towers use the kernels while the block runs."""
        with self._short.step(self.adapters), self._store.multiplying(MatmulTable(self._kernels.matmul(self.leaves))):
            yield


def four_bit_towers(model: EngineContext) -> list[Leaf]:
    """Return the layers over 4-bit weights of a model's towers and connectors that its device computes, streamed ones included."""
    paths = {row.module_path for row in model.anatomy.rows if row.part in TOWERS}
    return [
        one for one in model.hf_model.modules()
        if isinstance(one, Leaf) and not isinstance(one, HostLeaf) and is_read(one)
        and one.module_path in paths
    ]  # fmt: skip
