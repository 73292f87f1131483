"""B4: accelerate copies the dict in which Gemma 4's layers share keys and values."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, behind_peft, failure

BUG = Bug(
    title="KeyError in shared_kv_states at the first prefill of a Gemma 4 that PEFT dispatched",
    symptom="KeyError: 22 (E4B), 13 (E2B), 18 (Gemma 3n), or 'sliding_attention' from transformers 5.8 on, at "
    "shared_kv_states[...]",
    trigger="Gemma 4 E2B or E4B, or Gemma 3n, dispatched by accelerate without skip_keys: an adapter with a device_map to PEFT",
    cause="accelerate's send_to_device builds dict arguments again for each layer, so what a layer writes goes to a copy. "
    "transformers' own dispatch passes skip_keys, PEFT's does not",
    affected=(Affected("transformers", None, "5.23.0"), Affected("peft")),
    versions="run: transformers 5.6.2 fails (KeyError of a layer's number), 5.9.0 and 5.22.2 too (KeyError "
    "'sliding_attention': their UserDict is copied nevertheless), 5.23.0 passes (its KVSharingDict moves in place)",
    way_round="transformers 5.23.0; before that no device_map to PEFT on these models",
    trackers=(
        "huggingface/transformers#45312 (merged)", "huggingface/transformers#45347 (merged)",
        "huggingface/transformers#45663 (closed, FSDP2)", "huggingface/transformers#45716 (closed)",
        "huggingface/transformers#45912 (merged, UserDict)",
        "microsoft/onnxruntime#28188 (shared key/value layers in another runtime, named by users)",
    ),
    trimtab="no dispatch stands between layers: the model's own arguments reach them as they are",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a Gemma 4 with shared keys and values after PEFT dispatched it with a map of the right names."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    model = kit.peft(kit.load(base, device_map=TOWERS_OFF), adapter, device_map=behind_peft(TOWERS_OFF))
    try:
        logits = kit.forward(model)
    except KeyError as error:
        return Seen(PRESENT, failure(error))
    apart = float((logits - kit.forward(kit.peft(kit.load(base), adapter))).abs().max())
    return Seen(FIXED if apart == 0 else PRESENT, f"logits differ by {apart:.3g} from the unsplit model's")
