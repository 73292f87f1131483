"""C8: accelerate's automatic map of Gemma 4 omits buffers."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="accelerate's infer_auto_device_map forgets Gemma 4's layer_scalar and clip bounds",
    symptom="ValueError: The device_map provided does not give any device for the following parameters: "
    "...layer_scalar",
    trigger="infer_auto_device_map without no_split_module_classes on Gemma 4, where a decoder layer has to be "
    "split. transformers' \"auto\" passes the classes and is safe",
    cause="accelerate utils/modeling.py infer_auto_device_map replaces a module that does not fit by its children "
    "and parameters, and forgets the buffers that lie directly in it",
    affected=(Affected("accelerate"),),
    versions="accelerate 1.13.0 and 1.15.0 run: still there although its tracker is closed; with the classes as a "
    "list both are right",
    way_round="pass no_split_module_classes=list(model._no_split_modules) (a list: I11), or device_map=\"auto\" to "
    "transformers",
    trackers=(
        "huggingface/accelerate#4014 (closed)",
        "huggingface/accelerate#4020 (the fix for buffers, pull request, closed)",
    ),
    trimtab="a block is moved as one piece; a map that forgets a module is an error that names it",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Let accelerate plan an empty Gemma 4 within half of its size and look for tensors that the map omits."""
    import transformers
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import compute_module_sizes

    config = transformers.AutoConfig.from_pretrained(kit.checkpoint())
    with init_empty_weights():
        model = transformers.Gemma4ForConditionalGeneration(config)
    model.tie_weights()
    total_bytes = compute_module_sizes(model)[""]
    for percent in (45, 50, 55, 60):
        memory = {"cpu": total_bytes * percent // 100, "disk": 10 * total_bytes}
        device_map = infer_auto_device_map(model, max_memory=memory)
        lost = [name for name in model.state_dict() if not any(f"{name}.".startswith(f"{key}.") for key in device_map)]
        if lost:
            return Seen(PRESENT, f"a map for {percent} % of the model's bytes gives no device to {lost[0]}")
    return Seen(FIXED, "the maps for 45 to 60 % of the model's bytes name every tensor")
