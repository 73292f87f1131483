"""The kinds of findings of a scan, and one finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    breaks: the operation that fails because of it: "forward", "merge", "save", "answer" (silently wrong), "" for none.
    bugs: ids of the upstream catalogue. package: the main package with the bug.
    """

    name: str
    bugs: tuple[str, ...]
    package: str
    breaks: str
    meaning: str
    way_round: str


_NO_4BIT_OFFLOAD = (
    "Load the base with only unquantized modules (towers, embed_tokens_per_layer) on \"cpu\" or \"disk\", or the whole of "
    "it with trimtab.load, which keeps weights quantized wherever they are"
)  # fmt: skip
_BY_NAME = 'Name each module in the device map, without the "" entry'
KINDS = (
    Kind("quant-state-on-meta", ("A1", "A2"), "bitsandbytes", "forward",
         "the scales of a quantized weight are on the meta device", _NO_4BIT_OFFLOAD),
    Kind("quantized-weight-offloaded", ("A2",), "bitsandbytes", "forward",
         "a hook offloads a 4-bit weight and restores it without its scales", _NO_4BIT_OFFLOAD),
    Kind("wrong-scales", ("I16",), "bitsandbytes", "answer",
         "bitsandbytes applies the wrong scales to 4-bit weights on this CPU: the row length is not a multiple of the block size",
         "Move the base to the GPU first, leave these modules unquantized (llm_int8_skip_modules), or load with trimtab.load"),
    Kind("weight-on-meta", ("C1", "C6"), "accelerate", "forward",
         "a weight is on the meta device and no hook loads it", "Load the base again, one device map key for each module"),
    Kind("embedding-offloaded", ("D4",), "transformers", "forward",
         "the model reads the token embedding outside the module's forward", "Keep embed_tokens on the GPU"),
    Kind("shared-kv-copied", ("B4",), "transformers", "forward",
         "hooks copy the dictionary through which layers share keys and values",
         "Update transformers to 5.23.0, or load with device_map= instead of calling dispatch_model"),
    Kind("hooks-unknown", (), "accelerate", "forward", "several hooks of one module offload its weights", _BY_NAME),
    Kind("sequential-hook", ("C2", "C3"), "peft", "merge",
         "an offload hook behind the one of a \"\" entry: PEFT's merge skips such modules silently, and "
         "save_pretrained of the model fails", _BY_NAME),
    Kind("nothing-quantized", ("A5",), "transformers", "answer",
         "the model reports that it is quantized, and no module is",
         'Omit llm_int8_enable_fp32_cpu_offload when everything is on one device, and do not map "" to "cpu"'),
    Kind("left-unquantized", ("A4",), "transformers", "", "linears in full precision in a quantized model",
         "By design for modules that the map offloads: count their bytes at full size"),
    Kind("experts-unquantized", ("H3",), "transformers", "", "fused experts in full precision in a quantized model",
         "None in the stock stack"),
    Kind("lora-on-meta", ("E2",), "peft", "forward", "adapter weights are on the meta device",
         "Load with trimtab.bridge.load_peft"),
    Kind("lora-wrong-device", ("B8",), "peft", "forward", "adapter weights are on another device than their layer computes on",
         "Load with trimtab.bridge.load_peft"),
    Kind("adapter-does-nothing", ("E1",), "peft", "answer", "every B of the adapter is zero: the output is the base's",
         "Compare the adapter's keys with the model (trimtab inspect), or load with trimtab.bridge.load_peft"),
    Kind("module-does-nothing", ("E1",), "peft", "answer", "B is zero while other modules of the adapter have one",
         "Compare the adapter's keys with the model (trimtab inspect), or load with trimtab.bridge.load_peft"),
    Kind("keys-without-effect", (), "", "", "tensors of the adapter that match no module of this model",
         "None needed: they had no effect during training either"),
    Kind("not-where-the-map-says", ("B1", "C6"), "accelerate", "", "a module is on another device than in hf_device_map",
         "One device map key for each module"),
    Kind("map-key-names-nothing", ("C5",), "accelerate", "", "a device map key that matches no module", "Correct the key"),
    Kind("tied-weights-untied", ("G1",), "accelerate", "answer", "two tied weights have become two tensors",
         "Keep the head and the token embedding on one device"),
    Kind("table-copied-whole", ("D6",), "accelerate", "", "an offloaded table that every forward copies whole",
         "trimtab.load fetches only the rows that a prompt needs"),
)  # fmt: skip
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Finding:
    """One finding of the scan. count: number of modules; module_path: the first of them, or their parent."""

    kind: str
    module_path: str
    detail: str
    count: int = 1

    @property
    def bugs(self) -> tuple[str, ...]:
        return BY_NAME[self.kind].bugs

    @property
    def breaks(self) -> str:
        return BY_NAME[self.kind].breaks

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bugs": list(self.bugs), "breaks": self.breaks}
