"""Which bugs do device maps and offload hooks have?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, error_of, failure, installed_source, quiet, seen

C1_CATCHALL_DISK = Bug(
    title="A device map with \"\" and \"disk\" cannot be loaded: a tensor \"is on the meta device\"",
    symptom="ValueError: <first parameter> is on the meta device, we need a `value` to put in on <device>",
    trigger="device_map with the empty key for \"everything else\" and \"disk\" for some module, on any model, "
    "quantized or not",
    cause="accelerate hooks.py attach_align_device_hook_on_blocks gives the root module a hook with "
    "place_submodules=True, which places every tensor below it, also those left on disk, before their own module "
    "gets its hook",
    affected=(Affected("accelerate"),),
    versions="accelerate 1.13.0 and 1.15.0 run, with Llama and with Gemma 4: nothing in it belongs to one family",
    way_round="write a map that names every module and has no \"\" key",
    trackers=("huggingface/transformers#36766 (same message, Gemma 3 with an automatic map, closed)",),
    trimtab="\"\" in its device map only says where the rest belongs; the longest key decides and each tensor is "
    "placed once",
    evidence="run",
)  # fmt: skip


def c1_catchall_disk(kit: Kit) -> Seen:
    """Keep one of two decoder layers on disk, everything else by the empty key."""
    path, device_map = kit.checkpoint("llama"), {"model.layers.1": "disk", "": 0}
    fault = error_of(lambda: kit.load(path, device_map=device_map), ValueError, "is on the meta device")
    return seen(fault, 'a map with "" and "disk" was loaded')


C2_MERGE_DROPS_OFFLOADED = Bug(
    title="Merging silently drops the adapters of offloaded modules if the device map has a \"\" key",
    symptom="silent: merge_and_unload or merge_adapter returns, and on offloaded modules the weight is what it was",
    trigger="a map with \"\" and \"cpu\" that is in force while merging: given to PEFT with the adapter, or that of "
    "the base when transformers load_adapter was used. PEFT's own new plan (B1) hides it by undoing the offload",
    cause="the empty key leaves a first hook on every submodule, so that offload becomes the second of an accelerate "
    "SequentialHook; PEFT tuners_utils.py onload_layer knows AlignDevicesHook alone and merges into tensors without "
    "data",
    affected=(Affected("peft"), Affected("accelerate")),
    versions="peft 0.19.1 and 0.21.2 run, through PEFT and through transformers load_adapter; a map without \"\" "
    "merges every layer in both",
    way_round="give a map without \"\", and compare weights before and after a merge",
    trimtab="the line has no hooks; for stock models the bridge brings the offload hook in front while PEFT merges, "
    "so that every layer is reached",
    evidence="run",
)  # fmt: skip


def c2_merge_drops_offloaded(kit: Kit) -> Seen:
    """Merge an adapter on two layers, one of them offloaded, and list the changed weights."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    split = {"base_model.model.model.layers.1": "cpu", "": 0}
    model = kit.peft(kit.load(path, device_map={"model.layers.1": "cpu", "": 0}), adapter, device_map=split)
    layers = model.base_model.model.model.layers
    before = [_weight(layer.self_attn.q_proj.base_layer).clone() for layer in layers]
    model.merge_adapter()
    after = [_weight(layer.self_attn.q_proj.base_layer) for layer in layers]
    resident, offloaded = [float((new - old).abs().max()) for new, old in zip(after, before)]
    if resident == 0:
        raise RuntimeError("the resident layer was not merged either")
    text = f"merged weights differ from the base by up to {resident:.2f} (resident layer), {offloaded:.2f} (offloaded layer)"
    return Seen(FIXED if offloaded else PRESENT, text)


def _weight(layer: Any) -> Any:
    """Return a layer's weight, from the storage of its offload hook if the layer itself has no data."""
    if not layer.weight.is_meta:
        return layer.weight.detach()
    hook = layer._hf_hook
    parts = getattr(hook, "hooks", [hook])
    return next(part.weights_map["weight"] for part in parts if getattr(part, "offload", False))


C3_SAVE_SEQUENTIAL = Bug(
    title="save_pretrained of a split model fails if its device map has a \"\" key",
    symptom="AttributeError: 'SequentialHook' object has no attribute 'weights_map'",
    trigger="save_pretrained of a model loaded with \"\" and \"cpu\" in one map",
    cause="transformers integrations/accelerate.py load_offloaded_parameter reads weights_map of the module's hook, "
    "which is a SequentialHook there (C2)",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0 run (not only the newest); a map without \"\" saves in both",
    way_round="load with a map without \"\" before saving",
    owner=("transformers", "accelerate"),
    trimtab="it has no hooks; a merged checkpoint is written from the files, not from a loaded model",
    evidence="run",
)  # fmt: skip


def c3_save_sequential(kit: Kit) -> Seen:
    """Save a model of two layers, one of them offloaded, the rest placed by the empty key."""
    model = kit.load(kit.checkpoint("llama"), device_map={"model.layers.1": "cpu", "": 0})
    fault = error_of(lambda: model.save_pretrained(str(kit.folder / "c3")), AttributeError, "weights_map")
    return seen(fault, 'a model with "" and "cpu" in its map was saved')


C4_CATCHALL_PEAK = Bug(
    title="A \"\" key in the device map puts the whole model on the GPU before it offloads part of it",
    symptom="silent, or out of memory while loading although the final placement fits",
    trigger="device_map with \"\" on the GPU and \"cpu\" for large modules",
    cause="accelerate hooks.py attach_align_device_hook_on_blocks: the root's hook places all tensors below it on "
    "the main device; modules to offload get their own hook afterwards",
    affected=(Affected("accelerate"),),
    versions="accelerate 1.13.0 and 1.15.0 run: every tensor of the offloaded module goes to the main device once; "
    "without \"\" none does",
    way_round="write a map that names every module and has no \"\" key",
    trimtab="it reads each tensor straight into its place, so loading never needs more than the plan says",
    evidence="run",
)  # fmt: skip


def c4_catchall_peak(kit: Kit) -> Seen:
    """Count the bytes of an offloaded layer that accelerate puts on the main device while it attaches its hooks."""
    path = kit.checkpoint("llama")
    catch_all = _moved_bytes(kit, path, {"model.layers.1": "cpu", "": 0})
    explicit = _moved_bytes(kit, path, LLAMA_SPLIT)
    text = f'bytes of the offloaded layer put on the main device: {catch_all} with a "" key, {explicit} without'
    return Seen(PRESENT if catch_all > explicit else FIXED, text)


def _moved_bytes(kit: Kit, path: Path, device_map: Mapping[str, Any]) -> int:
    import accelerate.hooks as hooks
    import torch

    moved: dict[str, int] = {}
    original = hooks.set_module_tensor_to_device

    def watched(module: Any, tensor_name: str, device: Any, *args: Any, **kwargs: Any) -> Any:
        # The imitated GPU is a device object; the text "cpu" would be offload.
        if isinstance(device, torch.device) and device.type == "cpu" and tensor_name.startswith("model.layers.1."):
            moved[tensor_name] = module.get_parameter(tensor_name).nbytes
        return original(module, tensor_name, device, *args, **kwargs)

    hooks.set_module_tensor_to_device = watched
    try:
        kit.load(path, device_map=device_map)
    finally:
        hooks.set_module_tensor_to_device = original
    return sum(moved.values())


C5_UNKNOWN_KEYS = Bug(
    title="A device map key that names nothing is only a warning, and stays in hf_device_map",
    symptom="one UserWarning \"The following device_map keys do not match any submodules in the model\", and the key "
    "stays in hf_device_map; with a \"\" key the modules it was meant for go elsewhere. No warning at all for models "
    "that define _no_placement_params",
    trigger="a key from another model or another release, such as model.multi_modal_projector on Gemma 4",
    cause="accelerate utils/modeling.py check_device_map warns; transformers integrations/accelerate.py "
    "skip_device_map_check replaces it for models with _no_placement_params (qwen4_exp alone in 5.23.0)",
    affected=(Affected("accelerate", since="1.9.0"),),
    versions="accelerate 1.13.0 and 1.15.0 run; before 1.9.0 there was no warning; the silent exception is in "
    "transformers 5.18.0 to 5.23.0 and not in 5.15.0 (read)",
    way_round="compare the keys with model.named_modules() before loading",
    owner=("accelerate", "transformers"),
    trackers=("huggingface/accelerate#3584 (open when last seen)", "huggingface/accelerate#3613 (the warning, merged)"),
    trimtab="a key that names no module is an error that lists the near names",
    evidence="run",
)  # fmt: skip


def c5_unknown_keys(kit: Kit) -> Seen:
    """Load with a key that names nothing."""
    bad = "model.multi_modal_projector"
    with quiet() as messages:
        try:
            model = kit.load(kit.checkpoint("llama"), device_map={bad: "cpu", "": 0})
        except (KeyError, ValueError) as error:
            if bad not in str(error):
                raise
            return Seen(FIXED, f"refused: {failure(error)}")
    warning_count = sum(bad in line for line in messages)
    silent = installed_source("transformers.integrations.accelerate", "def skip_device_map_check")
    also = f"; silenced for models with _no_placement_params by {silent[0]}:{silent[1]}" if silent else ""
    kept = "stays in" if bad in model.hf_device_map else "is removed from"
    return Seen(PRESENT, f"loads with {warning_count} warning(s); the key {kept} hf_device_map{also}")


C6_PREFIX_COLLISION = Bug(
    title="A device map key for layers.1 also catches layers.10 to 19, embed_tokens also embed_tokens_per_layer",
    symptom="silent: modules without a separate key go where a shorter name says; to disk, they are left on meta",
    trigger="a map that names layers.1 (or embed_tokens) and leaves longer names to a \"\" key",
    cause="transformers integrations/accelerate.py expand_device_map joins the keys to a regular expression without "
    "an end of name; quantizers/quantizers_utils.py should_convert_module had the same fault",
    affected=(Affected("transformers"),),
    versions="the device map: 5.6.2 and 5.23.0 run. The skip list of the quantizer: fault in 5.6.2, boundary in "
    "5.23.0 (both run), none yet in 5.20.0 (read)",
    way_round="give every module a separate key",
    trimtab="names are compared segment by segment, in device maps and in place patterns",
    evidence="run",
)  # fmt: skip


def c6_prefix_collision(kit: Kit) -> Seen:
    """Check with transformers' functions where two modules with similar names are placed, and whether both are quantized."""
    from transformers.integrations.accelerate import expand_device_map
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = ["model.layers.11.norm.weight", "model.embed_tokens_per_layer.weight"]
    placed = expand_device_map({"model.layers.1": "cpu", "model.embed_tokens": "cpu", "": 0}, names)
    wrong = [name for name in names if placed[name] == "cpu"]
    quantizer = "has a boundary" if should_convert_module("model.layers.11.norm", ["model.layers.1"]) else "collides too"
    if wrong:
        return Seen(PRESENT, f"layers.1 and embed_tokens also place {', '.join(wrong)}; the quantizer's list {quantizer}")
    return Seen(FIXED, f"names end where a key ends; the quantizer's list {quantizer}")


C7_DEVICE_OBJECTS = Bug(
    title="torch.device objects in a device map break what is on disk: \"device(type=...) is invalid\"",
    symptom="SafetensorError: device device(type='cpu') is invalid, at the first forward",
    trigger="device_map values that are torch.device objects, and something on \"disk\"",
    cause="accelerate utils/offload.py OffloadedWeightsLoader hands the value of the map to safetensors.safe_open, "
    "which takes text and numbers",
    affected=(Affected("accelerate"), Affected("safetensors")),
    versions="accelerate 1.13.0 and 1.15.0 with safetensors of today, both run",
    way_round="write 0, \"cuda:0\", \"cpu\" instead of torch.device",
    trimtab="a value of a device map is a number, text or anything whose str() is a device",
    evidence="run",
)  # fmt: skip


def c7_device_objects(kit: Kit) -> Seen:
    """Run a model with one layer on disk and device objects for the rest."""
    import torch
    from safetensors import SafetensorError

    here = torch.device("cpu")
    places = {name: "disk" if place == "cpu" else here for name, place in LLAMA_SPLIT.items()}
    fault = error_of(lambda: kit.forward(kit.load(kit.checkpoint("llama"), device_map=places)), SafetensorError, "is invalid")
    return seen(fault, "device objects and disk work together")


C8_LAYER_SCALAR = Bug(
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


def c8_layer_scalar(kit: Kit) -> Seen:
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
