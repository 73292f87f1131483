"""Which modules had other names before 0.2.0, importable until 0.3.0 with a warning?"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# room (former folder): new<old; a bare name keeps its name; new</folder/old comes from another folder.
TABLE = """
formats (checkpoint): packed
adapters (checkpoint): adapter config<adapter_config file<adapter_file config<adapter_keys match<adapter_match
planning/values (plan): blocks blocks<budget blocks<machine byte_sizes<cost byte_sizes<dtypes byte_sizes<kv_form
    byte_sizes<kv_pool cards copy_order<pieces execution pipeline reading rows
planning/request (plan): card_machine max_memory overrides<placing
planning/plan (plan): chart<picture plan<module_tree plan table
planning/memory (plan): activations adapters<adapter_room media<media_memory prefix_cache<prefix_memory prompts<prompt_memory
    towers<tower_memory
planning (plan): __init__ candidates<head_cost options planner planner<unpacked placing<step_work search search<reasons
engine/cuda (runtime): nvrtc<capturing check_cache<kept_checks launch_config<cuts nvrtc nvrtc<product_cuts
    shipped_configs<launch_configs
engine/formats (runtime): bitsandbytes<quant bitsandbytes<importing int8_head<head8
engine/tiers (runtime): reader<read reader<arena streaming<spill streaming<tiers
engine/memory (runtime): graph_cache graph_cache<form_uses out_of_memory rates<devices reserve<transient_room
    shared_pool<prompt_room shared_pool<memory_segments graph_cache<step_memory
engine/lora (runtime): store<attached_adapter base_values fewer_ops<short_ops store<held_adapter layers<lora mixes
    routers store<adapter_store
engine/layers (runtime): leaves leaves<tables leaves<unpacked_weights
engine/kv (runtime): int8<hf_kv_int8 kv_cache<hf_slots sequence<kv_pages prefix_layout prefix_store
engine/kernels (runtime): attention_and_norms<fused autotune<tuning autotune<compile_ahead dequantize<prompt_kernels
    device_kernels<kernels embed_and_logits<ends gemm4<many_rows gemv4<matvec selfcheck<fused_check
engine/batched_lora (runtime): columns<adapter_columns columns<unpacked_columns table<slots
engine/passes (runtime): attention<hf_attention attention<cudnn chunk_forward<hf_prefill chunk_forward<packed_prefill
    media_embeddings<hf_prompt_media
engine/families (runtime): chunk<hf_gemma4_chunk chunk<hf_gemma4_last step<hf_gemma4
engine/decode (runtime): batch_invariant<company decode_step decode_step<batch_state step_capture
    step_choice
engine/towers (runtime): bounds_check<tower_check pieces<tower_forms graphs<tower_graphs graphs<tower_ops pieces<tower_pieces
engine/loader (runtime): anatomy_builder load processor<hf_processor tracing<probe transformers_model<hf
    transformers_model<hf_renames head_kernel<head8_choice
engine/templates (runtime): budget<template_budget costs<template_costs budget<hf_templates
engine/chat (runtime): answer_forms answer_reader call_values control_tokens marks media media_check media_headers
    prompt<chat control_tokens<turn_end
engine/prefill (runtime): encoder_cache rows<open_prompts packing<prompt_layouts packing<packed_prompts
    prefill<prefill_graphs prefix_cache rows<prompt_job stock_pass<hf_own_pass tower_passes warm_up<capture_ahead
engine/batch (runtime): batch generate kept_batch request<batch_request request<hf_generate request<finite kept_batch<turns
engine/calls (runtime): batch_calls<many conversation embedding embedding<inner embedding<prompt_scores
engine (runtime): __init__ model_calls<asking model_calls<waiting float16_check memory_shares model model_calls<planned_adapters
    tune<tune_model
serve/worker (runtime): prompt_inputs<media_ahead
demo (demo): demo<line
cli/commands (.): plan_run<show
. (runtime): request<content_parts
"""

# former module (place of its former members): new<old; a bare name keeps its name. Of the same arguments, or with more. A name of
# a former module that is neither here nor in its successor has none: it raises AttributeError.
MEMBERS = """
runtime/cuts (engine/cuda/launch_config): LaunchConfig<Cut
runtime/prompt_room (engine/memory/shared_pool): PrefillMemoryPool<PromptRoom
runtime/leaves (engine/layers/leaves): StationaryLinear<StillLeaf StagedLinear<StagedLeaf
runtime/hf_slots (engine/kv/kv_cache): BatchedKVCache<SlotCache
runtime/hf_slots (engine/kv/sequence): reset_offset copy_offset read_offset has_three_axes placeholder_ids media_ids
runtime/hf_slots (engine/memory/graph_cache): restore
runtime/kept_checks (engine/cuda/check_cache): CardEntries<KeptChecks
runtime/kernels (engine/kernels/device_kernels): DeviceKernels<Kernels
runtime/ends (engine/kernels/embed_and_logits): with_argmax<with_likeliest argmax_logits<likeliest
runtime/packed_prefill (engine/passes/chunk_forward): Buffers<PackBuffers
runtime/hf_gemma4 (engine/families/step): TokenPositions<Where
runtime/hf_gemma4 (engine/families/families): why_not ACTIVATIONS
runtime/hf_gemma4_last (engine/prefill/rows): select_adapter
runtime/hf_gemma4_chunk (engine/prefill/rows): layers_of
runtime/open_prompts (engine/prefill/rows): may_be_open<are_possible
runtime/routers (engine/lora/layers): RouterAdapter
runtime/step_capture (engine/memory/graph_cache): REPLAY_TOLERANCE
runtime/step_capture (engine/tiers/streaming): in_pass
runtime/probe (engine/loader/tracing): TooLargeError<TooManyModulesError
runtime/marks (engine/chat/control_tokens): turns_of
runtime/packed_prompts (engine/prefill/packing): PackedPrefill<Packs
runtime/prefill_graphs (engine/prefill/prefill): PrefillRunner<Prompts
runtime/batch_request (engine/batch/request): SampledToken<Drawn PendingToken<First
runtime/hf_generate (engine/chat/control_tokens): end_token_ids
runtime/hf_generate (engine/batch/generate): Logprobs
runtime/planned_adapters (engine/model_calls): match_planned<match read_held<read
runtime/quant (engine/formats/packed): CodeTables PlainShell WideShell is_narrow widened keep
plan/cost (formats/record): packed_parts packed_bytes WEIGHT_BLOCK NESTED_BLOCK CODE_BYTES HEAD8 HEAD_PIECE_VALUES
plan/plan (planning/plan/contents): FilesRead Handover Stamps Tree anatomy_key PLAN_VERSION
plan/module_tree (planning/plan/contents): FilesRead Handover Stamps Tree anatomy_key PLAN_VERSION
plan/options (planning/placing): ModeRefusedError
plan/options (planning/candidates): FASTEST_FIRST HEAD8_KL
plan/planner (planning/placing): READ_BUFFER_BYTES
plan/planner (planning/search): UNLIMITED_BYTES
checkpoint/packed (formats/bitsandbytes): STATE STATE_KEYS NESTED_KEYS BLOCKSIZES STORAGE_BYTES LOGICAL_DTYPES MAX_STATE_BYTES
    ROW_FORMAT KINDS SIDES
"""


def moves() -> dict[str, str]:
    """Return old -> new, both as paths below trimtab/ without .py."""
    found: dict[str, str] = {}
    for line in TABLE.strip().replace("\n    ", " ").splitlines():
        head, _, names = line.partition("): ")
        room, _, former = (part.strip().removeprefix(".") for part in head.partition(" ("))
        for name in names.split():
            new, _, old = name.partition("<")
            old = old or new
            source = old.removeprefix("/") if old.startswith("/") else f"{former}/{old}" if former else old
            found[source] = f"{room}/{new}" if room else new
    return found


def modules() -> dict[str, str]:
    """Return former dotted name -> present dotted name, for each module and folder that was renamed."""
    dotted = {_dotted(old): _dotted(new) for old, new in moves().items()}
    taken = {new.rsplit(".", count)[0] for new in dotted.values() for count in range(4)}  # a folder with that name exists
    return {old: new for old, new in dotted.items() if old not in taken}


def members() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (former module, name) -> (module, name), dotted, for each function, class and constant that is elsewhere now."""
    found = {}
    for line in MEMBERS.strip().replace("\n    ", " ").splitlines():
        head, _, names = line.partition("): ")
        former, _, place = head.partition(" (")
        for name in names.split():
            new, _, old = name.partition("<")
            found[_dotted(former), old or new] = _dotted(place), new
    return found


def _dotted(path: str) -> str:
    return f"trimtab.{path}".replace("/", ".").removesuffix(".__init__")


class _Folder(ModuleType):
    """A former folder, or a former module with `MEMBERS`, with the names of what replaced it. Where it replaces `trimtab.plan`,
    it can be called like the function."""

    def __getattr__(self, name: str) -> Any:
        new = None if name.startswith("__") and name != "__all__" else modules().get(self.__name__)
        if new is not None and name == "__all__":
            here = (one for one in dir(importlib.import_module(new)) if not one.startswith("_"))
            return sorted({*here, *(former for module, former in members() if module == self.__name__)})
        if new is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        place, present = members().get((self.__name__, name), (new, name))
        value = getattr(importlib.import_module(place), present)
        warnings.warn(
            f"{self.__name__}.{name} is {place}.{present} now; the former name goes with 0.3.0", DeprecationWarning,
            stacklevel=_outside(),
        )  # fmt: skip
        return value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__getattr__("__all__")]

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.__name__ != "trimtab.plan":
            raise TypeError(f"module {self.__name__!r} is not callable")
        return importlib.import_module("trimtab.api").plan(*args, **options)


class FormerNames(MetaPathFinder, Loader):
    """Finds modules by their former names. It comes first in the search, because Python also finds an emptied folder."""

    def __init__(self) -> None:
        self._modules: dict[str, str] = {}
        self._folders: set[str] = set()
        self._changed: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("trimtab."):
            return None
        if not self._modules:
            self._modules = modules()
            self._folders = {name for old in self._modules if (name := old.rpartition(".")[0]) in self._modules}
            self._changed = self._folders | {old for old, _ in members()}
        if fullname in self._modules or fullname in self._folders:
            return ModuleSpec(fullname, self, is_package=fullname in self._folders)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Folder(spec.name) if spec.name in self._changed else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = self._modules.get(old)
        if new is not None and old not in self._changed:
            warnings.warn(f"{old} is {new} now; the former name goes with 0.3.0", DeprecationWarning, stacklevel=_outside())
            sys.modules[old] = importlib.import_module(new)


def _outside() -> int:
    """Return the number of frames up to the importing code."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and ("importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") == __name__):
        frame, count = frame.f_back, count + 1
    return count
