"""A6: with device_map="auto" the layers that end on the CPU are quantized, and then fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure, on_cpu, quantized, unmark

BUG = Bug(
    title="device_map=\"auto\" quantizes the layers that it then puts on the CPU, where 4-bit cannot be offloaded",
    symptom="the model loads; its first forward fails as A2 (4-bit), or loading does as A1 or A3",
    trigger="device_map=\"auto\" (or another name) with llm_int8_enable_fp32_cpu_offload=True on a GPU that is too small",
    cause="transformers modeling_utils.py from_pretrained replaces layers (preprocess_model) before _get_device_map decides; "
    "the exemption of modules on the CPU (A4) looks only at a dict",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run with a map chosen in place of a small GPU's",
    way_round="infer the map first on an empty model, and pass it as a dict",
    trackers=("huggingface/transformers#22018 (closed)", "huggingface/transformers#29691 (state not known)"),
    trimtab="it plans first and quantizes by the plan; layers that do not fit are streamed, still quantized",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load with "auto" such that the inferred map puts one of two decoder layers on the CPU."""
    patched = "transformers.integrations.accelerate.infer_auto_device_map"
    with mock.patch(patched, return_value=on_cpu(LLAMA_SPLIT)), without_marks():
        model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4", device_map="auto"))
    count = quantized(model.model.layers[1])["Linear4bit"]
    try:
        kit.forward(model)
    except NotImplementedError as error:
        return Seen(PRESENT, f"the layer on the CPU has {count} Linear4bit; {failure(error)}")
    return Seen(FIXED, f"the layer on the CPU has {count} Linear4bit, and runs")


@contextmanager
def without_marks() -> Iterator[None]:
    """Remove transformers' mark before its dispatch, which would fail as A3 in older releases."""
    import transformers.modeling_utils as loading

    name = "accelerate_dispatch"
    real = getattr(loading, name)

    def dispatch(model: Any, *arguments: Any, **named: Any) -> Any:
        return real(unmark(model), *arguments, **named)

    with mock.patch.object(loading, name, dispatch):
        yield
