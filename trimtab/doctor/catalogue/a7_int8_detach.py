"""A7: removing accelerate's hooks from an offloaded 8-bit layer loses its scales."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure, on_cpu, unmark

BUG = Bug(
    title="An 8-bit layer has no scales (SCB) any more after accelerate's offload hook is removed",
    symptom="AttributeError: 'NoneType' object has no attribute 'dtype' in bitsandbytes at the next forward, or wrong numbers",
    trigger="an 8-bit layer is offloaded by accelerate and then its hooks are removed: PEFT does that first when it loads an "
    "adapter on such a base",
    cause="accelerate hooks.py AlignDevicesHook.detach_hook restored the weight without its SCB statistics",
    affected=(Affected("accelerate", None, "1.14.0"),),
    versions="run: accelerate 1.13.0 fails, with bitsandbytes 0.49.2 and 0.50.0; 1.14.0 and 1.15.0 do not",
    way_round="upgrade accelerate to 1.14.0; before that keep 8-bit layers on one device",
    trackers=(
        "huggingface/accelerate#4044 (pull request, merged)",
        "bitsandbytes-foundation/bitsandbytes#1786 (another int8 offload regression, of 0.48.0, fixed)",
    ),
    trimtab="no hook holds its weights: an 8-bit weight and its scales are plain tensors of one block",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Offload one of two 8-bit decoder layers, remove the hooks, and compare with the earlier answer."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    model = unmark(kit.load(kit.checkpoint("llama"), quant="int8", device_map={"": 0}))
    before = kit.forward(model)
    dispatch_model(model, on_cpu(LLAMA_SPLIT), force_hooks=True)
    remove_hook_from_submodules(model)
    try:
        apart = float((kit.forward(model) - before).abs().max())
    except (AttributeError, RuntimeError) as error:
        return Seen(PRESENT, failure(error))
    # The same packed weights on the same device: any difference is lost scales.
    return Seen(PRESENT if apart else FIXED, f"logits differ by {apart:.3g} after the hooks are gone")
