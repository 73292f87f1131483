"""G1: a tied head that is offloaded with its embedding cannot be saved, or read from disk."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="A tied head offloaded together with its embedding: the model cannot be saved, and older sets cannot run "
    "it from disk",
    symptom="RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk (save_pretrained); "
    "KeyError: lm_head.weight at the first forward pass when both are on \"disk\"",
    trigger="embed_tokens and lm_head of a model with tied weights, both \"cpu\" or both \"disk\". The head alone on "
    "\"cpu\" is silently tied to the resident table again, which is harmless",
    cause="dispatch makes two meta parameters of the one tensor, so that transformers no longer sees a tie when it "
    "saves; the disk index has the name of one end only (accelerate utils/offload.py)",
    affected=(Affected("transformers"), Affected("accelerate")),
    versions="saving: transformers 5.6.2 and 5.23.0 run, both fail. Disk: fails with accelerate 1.13.0 and "
    "transformers 5.6.2, runs with 1.15.0 and 5.23.0",
    way_round="keep both ends of a tied weight on one device, and not offloaded",
    trackers=(
        "huggingface/accelerate#4083 (disk, in 1.15.0)",
        "huggingface/peft#3126 (tied heads of adapters, in 0.19.0)",
    ),
    trimtab="a tied weight is one tensor on the execution device, and a map that sends it away is refused with the "
    "reason",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Save a tied model with table and head on the CPU, then run it with both on disk."""
    path = kit.checkpoint("qwen3")
    seen = []
    model = kit.load(path, device_map=_map("cpu"))
    try:
        model.save_pretrained(str(kit.folder / "g1"))
    except RuntimeError as error:
        if "share memory" not in str(error):
            raise
        seen.append(f"saving with both on the CPU: {failure(error)}")
    try:
        kit.forward(kit.load(path, device_map=_map("disk")))
    except KeyError as error:
        if "lm_head.weight" not in str(error):
            raise
        seen.append(f"running with both on disk: {failure(error)}")
    return Seen(PRESENT, "; ".join(seen)) if seen else Seen(FIXED, "a tied pair was saved from the CPU and run from disk")


def _map(place: str) -> dict[str, int | str]:
    resident: dict[str, int | str] = {"model.layers": 0, "model.norm": 0, "model.rotary_emb": 0}
    return resident | {"model.embed_tokens": place, "lm_head": place}
