"""B7: PEFT silently drops offload options."""

from __future__ import annotations

from typing import Any
from unittest import mock

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, behind_peft, failure

BUG = Bug(
    title="PEFT ignores offload_buffers and ephemeral_gpu_offload, and forgets the base's offload folder",
    symptom="silent for offload_buffers and ephemeral_gpu_offload; ValueError: We need an `offload_dir` to dispatch this model "
    "where the base had an offload_folder",
    trigger="PeftModel.from_pretrained(split base, adapter, offload_buffers=True, ephemeral_gpu_offload=True), as is often "
    "recommended; or a plan with \"disk\"",
    cause="peft_model.py load_adapter reads device_map, max_memory, offload_folder, offload_dir and offload_index, and drops "
    "every other name; ephemeral_gpu_offload is read only when DoRA is set up",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, run: dispatch_model does not get offload_buffers",
    way_round="pass offload_dir to PEFT (not offload_folder as well); the other two have no effect",
    trackers=(
        "huggingface/peft#136 (closed)", "huggingface/peft#225 (closed)", "huggingface/peft#774 (closed)",
        "huggingface/peft#2541 (named in the source)", "huggingface/accelerate#1281 (Windows)",
        "huggingface/transformers#22492 (closed, Windows)",
    ),
    trimtab="an option that has no effect is refused by name",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Give PEFT offload_buffers and record accelerate's arguments; then a plan with "disk" and no folder."""
    import peft.peft_model

    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    passed: set[str] = set()
    dispatch = peft.peft_model.dispatch_model

    def watched(model: Any, **options: Any) -> Any:
        passed.update(options)
        return dispatch(model, **options)

    with mock.patch("peft.peft_model.dispatch_model", watched):
        kit.peft(
            kit.load(base, device_map=TOWERS_OFF), adapter, device_map=behind_peft(TOWERS_OFF), offload_buffers=True,
            ephemeral_gpu_offload=True,
        )  # fmt: skip
    messages = [] if "offload_buffers" in passed else [f"offload_buffers dropped, dispatch_model got {sorted(passed)}"]
    to_disk = behind_peft({**TOWERS_OFF, "model.vision_tower": "disk"})
    try:
        kit.peft(kit.load(base, device_map=TOWERS_OFF, offload_folder=kit.folder), adapter, device_map=to_disk)
    except ValueError as error:
        if "offload_dir" not in str(error):
            raise
        messages.append(failure(error))
    return Seen(PRESENT, "; ".join(messages)) if messages else Seen(FIXED, "both reached accelerate")
