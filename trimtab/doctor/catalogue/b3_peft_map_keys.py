"""B3: PEFT does not understand the keys of the base's own device map."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, failure

BUG = Bug(
    title="The device map that loaded the base does not fit PeftModel.from_pretrained",
    symptom="without a \"\" key: ValueError: The device_map provided does not give any device for the following parameters: "
    "base_model.model...; with one: a warning that keys match nothing, and the whole model on the \"\" device",
    trigger="PeftModel.from_pretrained(base, adapter, device_map=<the base's map>)",
    cause="peft_model.py load_adapter gives the map to accelerate's dispatch_model for the wrapped model, whose modules are "
    "called base_model.model.<name>",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, run; with a \"\" key the model answers, its offload undone. accelerate 1.15.0 warns of "
    "the keys only where the check runs",
    way_round="put base_model.model. before every key of the map that PEFT gets",
    trackers=("huggingface/peft#287 (closed)", "huggingface/peft#774 (closed)"),
    trimtab="a map names the model's own modules, and a key that names none is an error with near names",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Give PEFT the map that loaded the base, without and with the empty key."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    messages = []
    try:
        kit.peft(kit.load(base, device_map=TOWERS_OFF), adapter, device_map=TOWERS_OFF)
    except ValueError as error:
        if "does not give any device" not in str(error):
            raise
        messages.append(f'without "": {failure(error)}')
    model = kit.load(base, device_map=TOWERS_OFF)
    kit.peft(model, adapter, device_map={"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0})
    tower = model.model.vision_tower.encoder.layers[0].mlp.up_proj.linear.base_layer
    if tower.weight.device.type != "meta":
        messages.append('with "": the towers are not offloaded')
    return Seen(PRESENT, "; ".join(messages)) if messages else Seen(FIXED, "both maps were kept")
