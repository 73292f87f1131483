"""`plan`, `load` and `inspect`: from a request to a loaded model in three calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.adapter_names import Adapters, paths_of
from trimtab.adapters.adapter import AdapterFile, AdapterSpec, describe, match_adapter, read_adapter
from trimtab.adapters.file import check_beside, check_vocabulary, stamps_of, value_problems
from trimtab.checkpoint.anatomy import Anatomy, check_keep
from trimtab.checkpoint.folder import Checkpoint, check_has_weights, check_no_adapter, read_checkpoint
from trimtab.checkpoint.headers import is_finite
from trimtab.checkpoint.names import check_options, named_options
from trimtab.errors import CheckpointError, DoesNotFitError, RequestError
from trimtab.formats.gguf import window_reason
from trimtab.formats.packed import format_names, split_packed
from trimtab.formats.record import GGML_FLOATS, stored_format
from trimtab.planning import Machine, Plan, Rates, make_plan
from trimtab.planning.memory.adapters import head_change, held_bytes
from trimtab.planning.memory.media import NO_MEDIA, ServedMedia, media_memory
from trimtab.planning.memory.prefix_cache import prefix_reason
from trimtab.planning.options import TOWERS, Option, options_of, with_larger_card
from trimtab.planning.plan.contents import FilesRead, Handover, anatomy_key
from trimtab.planning.request.card_machine import machine_of, rates_of
from trimtab.planning.request.max_memory import device_refusal, merged_budgets
from trimtab.planning.values.byte_sizes import check_batched, check_pool, choose_dtype, keeps_16bit, reason_of
from trimtab.planning.values.cards import check_budget, check_here, find_card
from trimtab.planning.values.execution import formats_on_gpu
from trimtab.process import before_torch, phases
from trimtab.request import DEFAULT_NEW_TOKENS, DEFAULT_QUANT, EXPERTS, QUANTS, LoadRequest, full_dtype, parse_bytes, token_count

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from trimtab.engine.lora.store import HeldAdapter
    from trimtab.engine.model import LoadedModel
    from trimtab.request import PlanOptions


@named_options
def plan(
    model: str | Path,
    *,
    adapters: Adapters | None = None,
    gpu_memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    quant: str = "auto",
    dtype: str | torch.dtype = "auto",
    context: int | str = 4096,
    batch: int = 1,
    images: int = 1,
    audio_s: float = 30.0,
    place: Mapping[str, str] | None = None,
    device_map: Mapping[str, int | str] | None = None,
    keep_unquantized: Sequence[str] = (),
    device: str = "auto",
    offload_dir: str | Path | None = None,
    head: str = "auto",
    decode: str = "auto",
    card: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    prefix_cache: int | float | str | None = None,
    batch_invariant: bool = False,
    kv_tokens: int | str | None = None,
    kv: str = "full",
    answer_tokens: int | str = DEFAULT_NEW_TOKENS,
    experts: str = EXPERTS[0],
) -> Plan:
    """Return the plan of a model: the placement of every block, from headers alone. Nothing is loaded.

    model: a checkpoint folder, a hub id in the local cache, or "demo". adapters: name -> folder, or folders, whose names become
    the adapters' names; the demo has "demo/style" and others. gpu_memory, host_memory, prefix_cache: bytes, or text such as
    "4GiB" or "4G". None is the free memory for the budgets and no cache for prefix_cache, the host memory for cached keys and
    values. max_memory: both budgets in transformers' form. quant: "auto" or a format (none, nf4, nf4-dq, fp4, int8);
    keep_unquantized: patterns of modules that stay in `dtype`. dtype: "auto" is bfloat16, or the type of a card without it.
    context: most tokens of prompt and answer, per row. answer_tokens: of an expected answer; the placement with the least
    seconds for such an answer is chosen. batch: rows decoded together. images, audio_s: the most images and seconds of audio of
    one prompt. place: pattern -> tier, the last match wins. device_map: a map in transformers' form, instead of place. device:
    "auto", "cpu", "cuda" or "cuda:N". offload_dir: folder of the disk tier's file; None is the user's cache. head: "int8"
    computes with an 8-bit copy of the output head, "full" with the checkpoint's; "auto" takes 8 bits if they keep more of the
    decoder on the GPU. decode: how steps run: "auto", "eager", "graph" or "fused". card: plan for this GPU, a name such as "RTX
    4060 8GB" or a size; it need not be in this machine, and every figure is an estimate. batch_invariant: an answer has the
    same bits alone and in a batch. kv_tokens: how many tokens the rows of a batch hold together; None: each row its whole
    context. A number of tokens may be a text: "4k" is 4096. kv: "int8" keeps keys and values in 8 bits, which changes answers a
    little and is never chosen by the plan. experts: "auto" keeps stacked experts as the files hold them, "16bit" dequantizes
    them; "nf4", "nf4-dq" (as bitsandbytes packs a matrix) or "int8" (GGML's Q8_0) packs each while it is loaded, which changes
    answers and is never chosen by the plan.
    Errors: RequestError, CheckpointError, AdapterError, DoesNotFitError.
    """
    budgets: dict[str, Any] = {
        "gpu_memory_bytes": parse_bytes(gpu_memory, field_name="gpu_memory"),
        "host_memory_bytes": parse_bytes(host_memory, field_name="host_memory"), "device": device,
    }  # fmt: skip
    request = LoadRequest(
        model=str(model),
        adapters=paths_of(adapters),
        **(budgets if max_memory is None else merged_budgets(max_memory, **budgets, card=card)),
        quant=quant,
        dtype=full_dtype(dtype),
        context_tokens=_tokens(context, "context"),
        batch=batch,
        images=images,
        audio_s=audio_s,
        place=dict(place) if isinstance(place, Mapping) else {} if place is None else place,
        device_map=dict(device_map) if device_map is not None else None,
        keep_unquantized=keep_unquantized if isinstance(keep_unquantized, str) else tuple(keep_unquantized),  # type: ignore[arg-type]
        offload_dir=str(offload_dir) if offload_dir is not None else None,
        head=head,
        decode=decode,
        card=card,
        prefix_cache_bytes=parse_bytes(prefix_cache, field_name="prefix_cache") or 0,
        batch_invariant=batch_invariant,
        kv_tokens=_tokens(kv_tokens, "kv_tokens"),
        kv=kv,
        answer_tokens=_tokens(answer_tokens, "answer_tokens"),
        experts=experts,
    )
    try:
        return plan_request(request)
    except RequestError as exc:
        if exc.field != "device" or max_memory is None or device != "auto":
            raise
        raise device_refusal(exc, max_memory) from exc


def _tokens(value: int | str | None, field_name: str) -> Any:
    return token_count(value, field_name) if isinstance(value, str) else value


@dataclass
class PlanInputs:
    """Data that several plans of one model share: its module tree, its anatomies, and the machine.

    process_bytes: host memory of this process before it began to load libraries; None: it has not begun, read now.
    sees_values: whether a plan searches the values of adapters for NaN and infinity. A server searches before it starts
    a worker, and the worker when it reads an adapter. is_to_load: whether a checkpoint without weights is refused. is_served:
    whether a family that cannot be batched is. checks_folder: whether a model's folder that holds another adapter is.
    checkpoints, adapters, specs: by folder, as long as its files do not change; a spec also by its anatomy's identity.
    """

    probe: Any = None
    process_bytes: int | None = None
    anatomies: dict[tuple[Hashable, ...], Anatomy] = field(default_factory=dict)
    machines: dict[tuple[str, str | None], tuple[Machine, Rates]] = field(default_factory=dict)
    sees_values: bool = True
    is_to_load: bool = False
    is_served: bool = False
    checks_folder: bool = True
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    adapters: dict[str, AdapterFile] = field(default_factory=dict)
    specs: dict[tuple[str, int], tuple[AdapterSpec, Anatomy]] = field(default_factory=dict)
    files_read: dict[Hashable, Handover[Any]] = field(default_factory=dict)

    def checkpoint(self, model: str) -> Checkpoint:
        """Return a model's config and headers. They are read once, and again after a change. Errors: as `read_checkpoint`."""
        known = self.checkpoints.get(model)
        if known is None or not known.is_unchanged():
            if known is not None:  # what was made of its files goes with them
                self.probe, self.anatomies, self.specs, self.files_read = None, {}, {}, {}
            known = self.checkpoints[model] = read_checkpoint(model)
        return known

    def adapter(self, path: str, model: str = "") -> AdapterFile:
        """Return an adapter's files. They are read once, and again after a change. model, errors: as of `read_adapter`."""
        known = self.adapters.get(path)
        if known is None or known.stamps != stamps_of(path):
            known = self.adapters[path] = read_adapter(path, values=self.sees_values, model=model)
        return known

    def spec(self, path: str, file: AdapterFile, anatomy: Anatomy) -> AdapterSpec:
        """Return an adapter of `adapter` matched with an anatomy, once. Errors: as `match_adapter`."""
        spec, _ = self.specs.get((path, id(anatomy)), (None, None))
        if spec is None or spec.file is not file:
            spec = match_adapter(file, anatomy)
            self.specs[path, id(anatomy)] = spec, anatomy  # which keeps its identity
        return spec


def plan_request(
    request: LoadRequest, *, later: Mapping[str, str] | None = None, inputs: PlanInputs | None = None,
    is_advised: bool = True, media: ServedMedia | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a finished request (from the command line).

    later: adapters, name -> folder, that are loaded after the model. No device memory is counted for them, but if one
    changes the output head, the head stays full. These and the request's adapters stay in host memory, which is counted
    (None: no adapter stays there). inputs: of other plans of this model, reused and extended. is_advised: as for
    `make_plan`. media: the media that requests of a server may contain, whose host memory is counted (None: no server).

    A process that has not loaded torch plans without torch, if earlier processes cached the module tree of this config
    and these releases, and the machine's rates.
    """
    if request.kv_tokens is not None:
        check_pool(request.kv_tokens, rows=request.batch)
    inputs = inputs or PlanInputs()
    make = partial(_planned, later=later, inputs=inputs, media=media)
    try:
        return make(request, is_advised=is_advised)
    except DoesNotFitError as exc:
        if not is_advised or request.card is None:
            raise
        raise with_larger_card(exc, request, partial(make, is_advised=False)) from None


def _planned(
    request: LoadRequest, *, later: Mapping[str, str] | None, inputs: PlanInputs, is_advised: bool, media: ServedMedia | None
) -> Plan:  # fmt: skip
    """Return the plan of a request, as `plan_request` does. Its errors consider only this card."""
    from trimtab.machine import machine_cache
    from trimtab.machine.memory import disk_free_bytes, host_available_bytes, process_bytes

    phases.begin("reading the model")
    checkpoint = inputs.checkpoint(request.model)
    if inputs.is_to_load:
        check_has_weights(checkpoint)
    every = {**(later or {}), **request.adapters}
    if inputs.checks_folder:
        check_no_adapter(checkpoint, every.values())
    files = {name: inputs.adapter(path, request.model) for name, path in every.items()}  # before any slow work
    for path in every.values():
        check_vocabulary(path, checkpoint.folder)
    request = replace(request, quant=resolve_quant(request.quant, checkpoint))
    given = request
    bytes_now = process_bytes() if inputs.process_bytes is None else inputs.process_bytes
    bytes_before = None if machine_cache.torch_is_loaded() else bytes_now
    card = None if request.card is None else find_card(request.card)
    here = inputs.machines.get((request.device, request.card))
    if card is not None:
        check_budget(card, request.gpu_memory_bytes)
        here = here or (machine_of(card, host_available_bytes=host_available_bytes()), rates_of(card))
    elif here is None:
        here = machine_cache.find_machine(request.device, bytes_now)
    dtype_reason, model_type = "", str(checkpoint.config.get("model_type", ""))
    if given.dtype == "auto":
        dtype, dtype_reason = choose_dtype(model_type, here[0].capability if here else _capability(request.device))
        request = replace(request, dtype=dtype)
    first = replace(request, head="full") if request.head == "auto" else request
    narrow = keeps_16bit(request.dtype, dtype_reason)
    anatomy = anatomy_for(checkpoint, first, inputs, has_tree=here is None, keeps_16bit=narrow)
    check_class(checkpoint, anatomy, is_served=inputs.is_served)
    if inputs.is_served:
        check_batched(anatomy, field="model", value=request.model, hint="`trimtab run` and `model.answer` answer one at a time")
    if checkpoint.has_weights:
        check_routers(checkpoint, anatomy)
    kept_reason = prefix_reason(request, anatomy) if request.prefix_cache_bytes else ""
    specs = {name: inputs.spec(path, files[name], anatomy) for name, path in every.items()}
    machine, rates = here = here or _ask_machine(request, bytes_before)
    inputs.machines[request.device, request.card] = here
    if given.dtype == "auto" and choose_dtype(model_type, machine.capability)[0] != request.dtype:
        # The card was unknown before torch queried it.
        return _planned(given, later=later, inputs=replace(inputs, probe=None), is_advised=is_advised, media=media)
    head_refused, head8 = "", None
    if request.head == "auto" and not machine.on_cpu:
        head_refused = head_change(specs, anatomy)
        small = replace(request, head="int8")
        if not head_refused:
            head_refused = machine_cache.find_refusal(checkpoint, small, keeps_16bit=narrow) or ""
        try:
            if not head_refused:
                head8 = anatomy_for(checkpoint, small, inputs, keeps_16bit=narrow)
        except RequestError as exc:
            head_refused = str(exc).splitlines()[0]
            machine_cache.keep_refusal(checkpoint, small, head_refused, keeps_16bit=narrow)
    phases.begin("planning")
    disk_bytes = disk_free_bytes(request.offload_dir)
    held = 0 if later is None else held_bytes(every.values())
    made = make_plan(
        request, anatomy, adapters={name: specs[name].nbytes("float32") for name in request.adapters},
        expert_bytes={name: specs[name].nbytes("float32", on_experts=True) for name in request.adapters},
        adapter_stamps={name: files[name].stamps for name in request.adapters}, head_refused=head_refused, machine=machine,
        rates=rates, checkpoint_stamps=checkpoint.stamps,
        disk_free_bytes=min(disk_bytes, request.disk_memory_bytes or disk_bytes),
        held_bytes=held, media=NO_MEDIA if media is None else media_memory(request, anatomy, media),
        head8=head8, is_advised=is_advised,
        anatomy_of=lambda changed: anatomy_for(checkpoint, changed, inputs, keeps_16bit=narrow),
    )  # fmt: skip
    dtype_reason = dtype_reason or reason_of(request.dtype, machine.capability, model_type)
    window = window_reason(checkpoint, request.context_tokens) if checkpoint.is_gguf else ""
    made = replace(made, card=card, dtype_reason=dtype_reason, prefix_reason=kept_reason, window_reason=window)
    # The probed module tree takes a second to make and holds no weights. Only the first load of any of these plans can use it.
    read = Handover(FilesRead(checkpoint, inputs.specs, inputs.anatomies, inputs.probe), made.made_of)
    return replace(made, files_read=inputs.files_read.setdefault((made.made_of, inputs.probe is None), read))


def _capability(device: str) -> tuple[int, int] | None:
    """Return a GPU's compute capability from the driver, without torch; None for a CPU or if the driver does not report it."""
    if device == "cpu":
        return None
    from trimtab.machine.gpus import read_gpus

    index, gpus = int(device.partition(":")[2] or 0), read_gpus() or ()
    return gpus[index].capability if index < len(gpus) else None


def check_class(checkpoint: Checkpoint, anatomy: Anatomy, *, is_served: bool) -> None:
    """Raise CheckpointError for a class that gives no answers, unless it embeds texts and is not served."""
    if anatomy.answers_unsupported is not None and (is_served or not anatomy.has_vectors):
        works = "; `model.embed` and `model.hidden_states` of the library work" if anatomy.has_vectors else ""
        hint = f"`trimtab merge` works{works}"
        raise CheckpointError(anatomy.answers_unsupported, path=str(checkpoint.folder), hint=hint)


def check_routers(checkpoint: Checkpoint, anatomy: Anatomy) -> None:
    """Raise CheckpointError unless all values of the routers of experts are finite: a NaN may choose one expert for every token,
    and nothing shows it. Reads them, 24 MiB of Qwen3-30B-A3B; scales in GGML's blocks are examined while they are loaded."""
    plain, packed = split_packed(checkpoint) if anatomy.routers else ({}, {})
    for name in (one for row in anatomy.routers for tensor in row.tensors for one in tensor.sources):
        parts = packed[name].read_parts.values() if name in packed else [plain[name]] if name in plain else []
        kind = GGML_FLOATS.get(packed[name].kind) if name in packed else None
        if not all(is_finite(part, kind or part.dtype) for part in parts):
            raise CheckpointError(
                "a router of experts has values that are NaN or infinite", path=str(checkpoint.path), tensor_name=name,
                hint="The file is damaged",
            )  # fmt: skip


def anatomy_for(
    checkpoint: Checkpoint, request: LoadRequest, inputs: PlanInputs, *, has_tree: bool = False, keeps_16bit: bool
) -> Anatomy:  # fmt: skip
    """Return the anatomy of a checkpoint: from the cache of this or an earlier process, or from the model's probe. has_tree: make
    the module tree also where the anatomy is cached: a load takes it, and a process that is measured next has it."""
    from trimtab.machine import machine_cache

    key = anatomy_key(request, keeps_16bit=keeps_16bit)
    if key in inputs.anatomies:
        return inputs.anatomies[key]
    anatomy = machine_cache.find_anatomy(checkpoint, request, keeps_16bit=keeps_16bit)
    if anatomy is None and request.keep_unquantized:
        whole = machine_cache.find_anatomy(checkpoint, replace(request, keep_unquantized=()), keeps_16bit=keeps_16bit)
        if whole is not None:  # it has the same modules: a mistake is known before torch is imported
            check_keep(request.keep_unquantized, whole.rows)
    if anatomy is None or has_tree:
        phases.begin_imports()
        from trimtab.engine.loader import transformers_model

        phases.begin("reading the model")
        probe = inputs.probe = inputs.probe or transformers_model.probe(checkpoint, request.dtype)
        if anatomy is None:
            anatomy = transformers_model.anatomy_of(
                probe, checkpoint, quant=request.quant, keep_unquantized=request.keep_unquantized, head=request.head,
                keeps_16bit=keeps_16bit, experts=request.experts,
            )  # fmt: skip
            machine_cache.keep_anatomy(checkpoint, request, anatomy, compares_values=probe.compares_values, keeps_16bit=keeps_16bit)
    inputs.anatomies[key] = anatomy
    return anatomy


def _ask_machine(request: LoadRequest, bytes_before: int | None) -> tuple[Machine, Rates]:
    """Return the machine and its rates, measured through torch, and cache them for later processes. bytes_before: memory of
    this process before torch; None if torch was loaded already."""
    phases.begin_imports()
    import torch

    import trimtab.engine.model  # noqa: F401  # so that the process has what loading imports (`read_machine`)
    from trimtab.engine.memory import rates as devices
    from trimtab.machine import machine_cache

    phases.begin("measuring the machine")
    machine = devices.read_machine(request.device, budget_bytes=request.gpu_memory_bytes)
    if bytes_before is not None:
        machine_cache.remember(machine, bytes_before=bytes_before, threads=torch.get_num_threads())
    return machine, devices.measure_rates(machine.execution_device)


def plan_options(request: LoadRequest, budget_bytes: int, *, inputs: PlanInputs | None = None) -> list[Option]:
    """Return the results of single changes: bytes and predicted tokens per second. budget_bytes: of the device.

    inputs: of the plan of the unchanged request. The model is read once for all options.
    """
    inputs = inputs or PlanInputs()
    here = inputs.machines.get((request.device, request.card))
    on_cpu = request.device == "cpu" if here is None else here[0].on_cpu
    parts = next((anatomy.parts for anatomy in inputs.anatomies.values()), TOWERS)
    return options_of(
        request, partial(plan_request, inputs=inputs, is_advised=False), budget_bytes=budget_bytes, on_cpu=on_cpu,
        capability=None if here is None else here[0].capability, towers=[part for part in TOWERS if part in parts],
    )  # fmt: skip


def device_budget_bytes(request: LoadRequest, inputs: PlanInputs) -> int:
    """Return the budget of the execution device: the request's, else the free bytes there; 0 if no plan has read them yet."""
    here = inputs.machines.get((request.device, request.card))
    free = 0 if here is None or here[0].on_cpu else here[0].gpu_free_bytes + here[0].context_bytes
    return request.gpu_memory_bytes or free


def resolve_quant(quant: str, checkpoint: Checkpoint) -> str:
    """Return the format to load in. Errors: RequestError if another format is requested of an already quantized checkpoint."""
    kinds = format_names(split_packed(checkpoint)[1])
    if not kinds:
        if quant not in ("auto", *QUANTS):
            stored_format(quant)  # raises for a name that is none
            raise RequestError(
                "is a format of files, which trimtab reads and does not make; this checkpoint is not quantized", field="quant",
                value=quant, allowed=("auto", *QUANTS),
            )  # fmt: skip
        return DEFAULT_QUANT if quant == "auto" else quant
    own = kinds[0]
    if quant not in ("auto", *kinds):
        raise RequestError(
            f"the checkpoint is already quantized ({', '.join(sorted(kinds))}) and is used as it is, never quantized twice",
            field="quant", value=quant, allowed=("auto", *sorted(kinds)),
        )  # fmt: skip
    return own if quant == "auto" else quant


def load(
    plan: Plan | str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    decode: str | None = None,
    stop_at_turn_end: bool = False,
    **options: Unpack[PlanOptions],
) -> LoadedModel:
    """Return the model of a plan, loaded. Use it as a context manager.

    plan: a plan, the .json file of a saved one, or a model, which is then planned with `options` (the arguments of
    `plan`). progress: called with (bytes read, total bytes). decode: another decode mode than the plan's; its memory
    beyond the plan must fit the budget. stop_at_turn_end: end answers at the chat template's end-of-turn token, also if
    the end tokens of the checkpoint lack it; without it they continue, as in transformers' `generate`.
    Errors: those of `plan`; CheckpointError and AdapterError for files that changed since the plan was made;
    DeviceError if the plan is for a card that is not in this machine, or memory runs out.
    """
    model = load_plan(_plan_to_load(plan, options, decode), progress=progress, decode=decode)
    if stop_at_turn_end:
        from trimtab.engine.chat import control_tokens

        control_tokens.stop_at_turn_end(model, is_asked=True)
    return model


def load_plan(
    made: Plan, *, progress: Callable[[int, int], None] | None = None, decode: str | None = None,
    held: dict[str, HeldAdapter] | None = None, reads_text: bool = False,
) -> LoadedModel:  # fmt: skip
    """Return the model of a plan, loaded, as `load` does. held, reads_text: as of `LoadedModel`."""
    phases.begin_imports()
    from trimtab.engine.memory import rates as devices
    from trimtab.engine.model import LoadedModel

    phases.begin("loading")
    # A program's environment is not changed; the command line has set it already.
    before_torch.use_threads(None, beside_others=False, environ=dict(os.environ))
    is_on_gpu = made.execution_device != "cpu"
    if made.card is not None:
        check_here(made.card, devices.gpu_names(), made.execution_device)
    # Windows' driver silently moves allocations that do not fit into host memory, so the free memory is checked first.
    if is_on_gpu and (made.card is not None or sys.platform == "win32"):
        devices.check_room(made)
    for name, path in made.request.adapters.items():
        if Path(path).is_dir():  # else reading says what is wrong; what the plan has read is not read again
            check_beside(path, name)
    files = made.files_read.take(made.made_of)
    return LoadedModel(made, progress=progress, files=files, decode=decode, held=held, reads_text=reads_text)


def _plan_to_load(given: Plan | str | Path, options: Mapping[str, Any], decode: str | None) -> Plan:
    if not isinstance(given, (Plan, str, os.PathLike)):
        raise RequestError(f"is {type(given).__name__}", field="plan", allowed=("a plan", "the file of a saved plan", "a model"))
    known = [name for name in signature(plan).parameters if name not in ("model", "decode")]
    check_options(options, known)
    is_saved = not isinstance(given, Plan) and str(given).endswith(".json") and Path(given).is_file()
    if isinstance(given, Plan) or is_saved:
        for name, value in options.items():
            raise RequestError("has no effect on a plan", field=name, value=value, hint="Plan again with it")
        return given if isinstance(given, Plan) else Plan.load(given)
    given_decode: dict[str, Any] = {} if decode is None else {"decode": decode}
    return plan(given, **options, **given_decode)


@named_options
def inspect(adapter: str | Path, *, model: str | Path | None = None) -> dict[str, Any]:
    """Return the targets of an adapter and, with a model, which tensors are applied, remapped or without effect.

    adapter: a folder that PEFT wrote, or "demo/style". model: a checkpoint folder, a hub id in the local cache, or "demo";
    None reads the adapter only. `not_finite` in the report lists the tensors with NaN or infinite values; every other command
    refuses such an adapter.
    Errors: AdapterError with every mismatch, CheckpointError.
    """
    file = read_adapter(str(adapter), values=False)
    report = {"not_finite": list(value_problems(file.tensors))}
    if model is None:
        return describe(file, None) | report
    checkpoint = read_checkpoint(str(model))
    check_vocabulary(file.folder, checkpoint.folder)
    anatomy = modules_of(checkpoint)
    formats = {"model_formats": formats_on_gpu(split_packed(checkpoint)[1])}
    return describe(file, match_adapter(file, anatomy)) | report | formats


def modules_of(checkpoint: Checkpoint) -> Anatomy:
    """Return the anatomy of a checkpoint as it is before any format is chosen, with experts in 16 bits. Errors: CheckpointError."""
    request = LoadRequest(model=str(checkpoint.folder), quant="none", dtype="bfloat16", head="full", experts=EXPERTS[1])
    return anatomy_for(checkpoint, request, PlanInputs(), keeps_16bit=False)
