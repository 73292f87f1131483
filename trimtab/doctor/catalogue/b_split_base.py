"""Which bugs does PEFT have on a split base?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, behind_peft, error_of, failure, seen

TOWERS_ON_DISK = {key: "disk" if place == "cpu" else place for key, place in TOWERS_OFF.items()}


def _gemma(kit: Kit) -> tuple[Path, Path]:
    """Return a Gemma 4 and an adapter on all of its parts."""
    base = kit.checkpoint()
    return base, kit.adapter(base, targets=EVERYWHERE)


B1_MAP_DISCARDED = Bug(
    title="Loading an adapter with PEFT undoes the base's device map",
    symptom="silent: hf_device_map becomes {\"base_model\": <device>} and the offload hooks are gone; towers that the user put "
    "on the CPU are on the GPU (or the reverse)",
    trigger="any base whose hf_device_map holds \"cpu\" or \"disk\", its first adapter, no device_map given to PEFT",
    cause="peft_model.py PeftModel.from_pretrained removes all hooks, load_adapter takes device_map=\"auto\" and infers a new "
    "map; the base's map and max_memory are not used. For a map of one device it calls model.to(device)",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, run; on a GPU the towers of a 4-bit model come back unquantized (A4)",
    way_round="give PEFT a map of your own with every key behind base_model.model. and no \"\" key (C2); or transformers' "
    "load_adapter (B9); or trimtab.bridge.load_peft",
    trackers=("huggingface/peft#287 (closed, never done as asked)",),
    trimtab="placement is decided once, before loading; an adapter goes to its layer's device and moves nothing",
    evidence="run",
)  # fmt: skip


def b1_map_discarded(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on the CPU, and check the map and a tower's hook."""
    base, adapter = _gemma(kit)
    model = kit.load(base, device_map=TOWERS_OFF)
    before = {key for key, place in model.hf_device_map.items() if place == "cpu"}
    after = kit.peft(model, adapter).hf_device_map
    evidence = f"before: {', '.join(sorted(before))} on the CPU; after: {after}, the tower's offload hook is "
    if _is_tower_offloaded(model) and len(after) > 1:
        return Seen(FIXED, evidence + "there")
    return Seen(PRESENT, evidence + "gone")


def _is_tower_offloaded(model: Any) -> bool:
    """Return whether an adapted layer of the vision tower has no data, because an offload hook keeps it."""
    weight = model.model.vision_tower.encoder.layers[0].mlp.up_proj.linear.base_layer.weight
    return bool(weight.device.type == "meta")


B2_REPLAN_DOUBLE_COUNT = Bug(
    title="PEFT's own plan counts the loaded base twice, and moves layers that fit to the CPU",
    symptom="log line \"no modules could be assigned to the following devices due to insufficient memory: 0: N bytes\", then A1, "
    "A2 or A3; or everything lands on the CPU: \"Expected all tensors to be on the same device, but got index is on cuda:0\"",
    trigger="as B1, on a GPU with less free memory than the base takes, which is every GPU that the base fills by half",
    cause="peft_model.py load_adapter passes max_memory=None on, so accelerate's get_max_memory asks the driver for free "
    "memory while the base is already there, and infer_auto_device_map places the whole base in it again",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, for 4-bit, 8-bit and bfloat16 alike, run under pressure on a GPU; the probe plays a GPU "
    "of 1.5 times the base",
    way_round="as B1; or pass PEFT a max_memory that counts the base as free",
    trackers=("huggingface/peft#287 (closed)",),
    trimtab="one plan from the weights' bytes and the budget, made before anything is loaded",
    evidence="run",
)  # fmt: skip


def b2_replan_double_count(kit: Kit) -> Seen:
    """Give PEFT's plan the free memory of a GPU of 1.5 times the base with the base on it, and check the placement."""
    base, adapter = _gemma(kit)
    model = kit.load(base, device_map=TOWERS_OFF)
    size_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))

    def balanced(_: Any, max_memory: Any = None, **__: Any) -> Any:
        return max_memory or {0: size_bytes // 2, "cpu": 100 * size_bytes}

    with mock.patch("peft.peft_model.get_balanced_memory", balanced), mock.patch("peft.peft_model.dispatch_model", _stop):
        try:
            kit.peft(model, adapter)
        except _PlannedError as planned:
            places = list(planned.device_map.values())
            on_cpu = places.count("cpu")
            evidence = f"1.5 times the base, the base on it: {on_cpu} of {len(places)} modules planned on the CPU"
            return Seen(PRESENT if on_cpu else FIXED, evidence)
    return Seen(FIXED, "an adapter was loaded without a plan of PEFT's own")


class _PlannedError(Exception):
    """Ends the load when the plan is known, before PEFT moves anything to a missing GPU."""

    def __init__(self, device_map: dict[str, Any]) -> None:
        self.device_map = device_map
        super().__init__("planned")


def _stop(_: Any, device_map: dict[str, Any], **__: Any) -> None:
    raise _PlannedError(device_map)


B3_PEFT_MAP_KEYS = Bug(
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


def b3_peft_map_keys(kit: Kit) -> Seen:
    """Give PEFT the map that loaded the base, without and with the empty key."""
    base, adapter = _gemma(kit)
    model = kit.load(base, device_map=TOWERS_OFF)
    fault = error_of(lambda: kit.peft(model, adapter, device_map=TOWERS_OFF), ValueError, "does not give any device")
    faults = [f'without "": {fault}'] if fault else []
    model = kit.load(base, device_map=TOWERS_OFF)
    kit.peft(model, adapter, device_map={"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0})
    if not _is_tower_offloaded(model):
        faults.append('with "": the towers are not offloaded')
    return seen("; ".join(faults), "both maps were kept")


B4_SHARED_KV = Bug(
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


def b4_shared_kv(kit: Kit) -> Seen:
    """Run a Gemma 4 with shared keys and values after PEFT dispatched it with a map of the right names."""
    base, adapter = _gemma(kit)
    model = kit.peft(kit.load(base, device_map=TOWERS_OFF), adapter, device_map=behind_peft(TOWERS_OFF))
    try:
        logits = kit.forward(model)
    except KeyError as error:
        return Seen(PRESENT, failure(error))
    apart = float((logits - kit.forward(kit.peft(kit.load(base), adapter))).abs().max())
    return Seen(FIXED if apart == 0 else PRESENT, f"logits differ by {apart:.3g} from the unsplit model's")


B5_DISK_ADAPTER = Bug(
    title="PEFT cannot load an adapter on a base with modules on disk, unless it is given a map",
    symptom="newest: NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty(). "
    "oldest: KeyError: 'base_model.model.model.model.audio_tower...' in _update_offload, also with a map",
    trigger="a base with \"disk\" in its device map, its first adapter",
    cause="newest: PEFT's own plan finds room on one device (B1) and calls model.to() on weights that are on meta. oldest: "
    "peft_model.py _update_offload joins the names of modules wrongly",
    affected=(Affected("peft"),),
    versions="run: peft 0.19.1 and 0.20.0 fail with and without a map; 0.21.0 and 0.21.2 fail without one, and with a map "
    "behind base_model.model. they load and equal the unsplit model",
    way_round="peft 0.21.0 or newer, with the base's map, every key behind base_model.model.; mind B6",
    trackers=("huggingface/peft#3468 (merged: the join of names)",),
    trimtab="the disk tier reads the checkpoint's own file; an adapter on such a layer is kept with its device",
    evidence="run",
)  # fmt: skip


def b5_disk_adapter(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on disk, without a map and with one of the right names."""
    base, adapter = _gemma(kit)
    failed, messages = False, []
    for name, options in (("no map", {}), ("a map", {"device_map": behind_peft(TOWERS_ON_DISK)})):
        split, whole = kit.load(base, device_map=TOWERS_ON_DISK), kit.peft(kit.load(base), adapter)
        try:
            apart = float((kit.forward(kit.peft(split, adapter, **options)) - kit.forward(whole)).abs().max())
        except (KeyError, NotImplementedError) as error:
            failed = True
            messages.append(f"{name}: {failure(error)}")
        else:
            failed |= apart != 0
            messages.append(f"{name}: logits differ by {apart:.3g} from the unsplit model's")
    return Seen(PRESENT if failed else FIXED, "; ".join(messages))


B6_CWD_COPY = Bug(
    title="Loading an adapter on a base on disk copies the base checkpoint below the current folder",
    symptom="silent: ./<absolute path without its root>/model.safetensors appears, as large as the base; after a change of the "
    "current folder the next forward fails with FileNotFoundError",
    trigger="a base in a local folder with modules on \"disk\", its first adapter by PEFT with a map (B5)",
    cause="peft_model.py _update_offload splits the absolute path of the safetensors file, joins it again without its root, and "
    "saves a renamed copy there; only paths of the hub cache (with \"--\") get a separate name",
    affected=(Affected("peft"),),
    versions="peft 0.21.0 and 0.21.2, run: file written, and not found after chdir. 0.19.1 and 0.20.0 end before that (B5). "
    "Run from / the path would be the original file: deduced, not run",
    way_round="give PEFT no base on disk from a local folder; or run in a scratch folder and stay there",
    trackers=("huggingface/peft#1431 (the pull request that the code is from)",),
    trimtab="it reads the checkpoint in place and writes no copy of it",
    evidence="run",
)  # fmt: skip


def b6_cwd_copy(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on disk from an empty current folder, and list its files afterwards."""
    base, adapter = _gemma(kit)
    model = kit.load(base, device_map=TOWERS_ON_DISK)
    with tempfile.TemporaryDirectory(dir=kit.folder, ignore_cleanup_errors=True) as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            kit.peft(model, adapter, device_map=behind_peft(TOWERS_ON_DISK))
        except KeyError as error:
            return Seen(NOT_APPLICABLE, f"PEFT ends before the copy is written (B5): {failure(error)}")
        finally:
            os.chdir(before)
        sizes = [file.stat().st_size for file in Path(folder).rglob("*.safetensors")]
    original_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if not sizes:
        return Seen(FIXED, "nothing was written below the current folder")
    return Seen(PRESENT, f"{sum(sizes)} B written below the current folder, the base's file has {original_bytes} B")


B7_OFFLOAD_KWARGS = Bug(
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


def b7_offload_kwargs(kit: Kit) -> Seen:
    """Give PEFT offload_buffers and record accelerate's arguments; then a plan with "disk" and no folder."""
    import peft.peft_model

    base, adapter = _gemma(kit)
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
    faults = [] if "offload_buffers" in passed else [f"offload_buffers dropped, dispatch_model got {sorted(passed)}"]
    to_disk = behind_peft({**TOWERS_OFF, "model.vision_tower": "disk"})
    split = kit.load(base, device_map=TOWERS_OFF, offload_folder=kit.folder)
    fault = error_of(lambda: kit.peft(split, adapter, device_map=to_disk), ValueError, "offload_dir")
    return seen("; ".join([*faults, *([fault] if fault else [])]), "both reached accelerate")


B8_WRONG_DEVICE = Bug(
    title="LoRA matrices on another device than their layer: Expected all tensors to be on the same device",
    symptom="RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu, in "
    "the forward of peft/tuners/lora",
    trigger="the LoRA matrices of a layer are on the CPU while its input is on the GPU: transformers' load_adapter on a base "
    "with offloaded layers (B9), or a base moved after the adapter was loaded",
    cause="tuners/lora/layer.py and bnb.py forward cast the input's dtype to that of lora_A, not its device; matrices of a layer "
    "whose weight is on meta (offloaded) stay where they were made, on the CPU, without a hook",
    affected=(Affected("peft"),),
    versions="the forward of 0.19.1 and 0.21.2 shown with torch's fake CUDA tensors on the CPU; on a GPU with a real layer. "
    "0.20.0 changed only dequantization (peft#3418)",
    way_round="move the LoRA matrices to the layer's execution device after loading; trimtab.bridge.load_peft does",
    trackers=(
        "huggingface/peft#3169 (open)", "huggingface/peft#3181 (pull request, closed: a reproducer was requested)",
        "huggingface/peft#3418 (merged, of dequantization)",
    ),
    trimtab="the matrices of a LoRA are put on the device where their layer computes, independent of its weight's tier",
    evidence="run", needs_gpu=True,
)  # fmt: skip


def b8_wrong_device(kit: Kit) -> Seen:
    """Run a LoRA layer on the GPU with its matrices on the CPU; without a GPU, with tensors that imitate one."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    if torch.cuda.is_available():
        return _run(model[0], "a CUDA layer")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda")
        except (AssertionError, RuntimeError) as error:
            return Seen(NOT_APPLICABLE, f"no GPU, and this torch cannot simulate one: {failure(error)}")
        return _run(model[0], "a fake CUDA layer")


def _run(layer: Any, what: str) -> Seen:
    import torch

    for module, device in ((layer.base_layer, "cuda"), (layer.lora_A["default"], "cpu"), (layer.lora_B["default"], "cpu")):
        weight = torch.empty(module.weight.shape, device=device)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        fault = error_of(lambda: layer(torch.empty(1, 8, device="cuda")), RuntimeError, "same device")
    return seen(fault and f"{what}, matrices on the CPU: {fault}", f"{what}, matrices on the CPU: runs")


B9_NATIVE_LOAD = Bug(
    title="transformers' load_adapter keeps the device map, but LoRA matrices of offloaded layers stay on the CPU without a hook",
    symptom="right answers and an untouched map as long as execution is on the CPU; on a GPU B8 at the first forward through an "
    "offloaded layer",
    trigger="model.load_adapter(path) on a base with offloaded layers that the adapter targets",
    cause="PEFT makes the matrices of a layer whose weight is on meta on the CPU (tuners_utils.py "
    "_move_adapter_to_device_of_base_layer moves no matrix of such a layer), and nothing gives them a hook",
    affected=(Affected("peft"), Affected("transformers")),
    versions="transformers 5.6.2 with peft 0.19.1 and 5.23.0 with 0.21.2, run: map and hooks kept, logits equal the unsplit "
    "model's, matrices without a hook. The failure on a GPU is deduced from that and B8",
    way_round="the best stock path where the adapter targets no offloaded layer; else move the matrices to the execution device "
    "after loading, or trimtab.bridge.load_peft",
    trackers=("huggingface/peft#3169 (open, the same error)",),
    trimtab="the matrices of a LoRA are put on the device where their layer computes, independent of its weight's tier",
    evidence="run",
)  # fmt: skip


def b9_native_load(kit: Kit) -> Seen:
    """Load an adapter natively on a base with its towers on the CPU: the map, a tower's LoRA, the answer."""
    base, adapter = _gemma(kit)
    whole, split = kit.load(base), kit.load(base, device_map=TOWERS_OFF)
    before = dict(split.hf_device_map)
    for model in (whole, split):
        model.load_adapter(str(adapter))
    kept = "kept" if split.hf_device_map == before else "changed"
    apart = float((kit.forward(split, "image") - kit.forward(whole, "image")).abs().max())
    layer = split.model.vision_tower.encoder.layers[0].mlp.up_proj.linear
    matrix = layer.lora_A["default"]
    is_offloaded = layer.base_layer.weight.device.type == "meta"
    has_hook = hasattr(matrix, "_hf_hook") or hasattr(layer, "_hf_hook")
    evidence = (
        f"map {kept}, logits differ by {apart:.3g} from the unsplit model's; LoRA of an offloaded layer on "
        f"{matrix.weight.device}, {'with' if has_hook else 'without'} a hook"
    )
    return Seen(PRESENT if is_offloaded and not has_hook else FIXED, evidence)
