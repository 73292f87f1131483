"""Which modules had other names before 0.2.0? The old names can be imported until 0.3.0, with a warning.

Kept are names of releases; a name that a module had only between two releases is not.
A former module whose name is a room now has no alias: trimtab.process, trimtab.cli, trimtab.serve.media, trimtab.serve.worker, and
trimtab.doctor.bisect, cases, preflight and probes.
"""

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
. (.): _version errors printable
process (.): child<inside exit_codes files interrupts json_file packages redact runner<process threads
    user_cache</machine/own_folder work_folder packages</machine/installed
report (report): __init__ charts
. (.): adapter_names adapter_names<demo_names request
checkpoint (checkpoint): __init__ anatomy config_limits end_tokens folder headers hub</download names patterns
    names<renames unreadable writer<write
formats (checkpoint): packed
adapters (checkpoint): adapter config<adapter_config file<adapter_file keys<adapter_keys match<adapter_match
    patch<adapter_patch rules<adapter_rules stack_layout file<adapter_values file<vocabulary
    file<adapter_beside
planning/values (plan): blocks budget byte_sizes<cost byte_sizes<dtypes cards copy_order<pieces execution kv_bytes<kv_form
    kv_bytes<kv_pool budget<machine
    pipeline reading rows
planning/request (plan): card_machine max_memory overrides<placing
planning/plan (plan): chart<picture plan<module_tree plan table
planning/memory (plan): activations adapters<adapter_room media<media_memory prefix_cache<prefix_memory
    prompts<prompt_memory towers<tower_memory
planning (plan): __init__ candidates<head_cost options planner planner<unpacked placing<step_work reasons search
machine (machine): __init__ anatomy_cache<anatomies anatomy_cache</checkpoint/anatomy_json environment</environment
    environment_child</environment_inside gpus gpus<gpu_process machine_cache<known memory preload
    machine_cache<rates_file
engine/cuda (runtime): capture_stream<capturing check_cache<kept_checks launch_config<cuts nvrtc
    nvrtc<product_cuts shipped_configs<launch_configs
engine/formats (runtime): bitsandbytes<quant bitsandbytes<importing int8_head<head8
engine/formats (merge): coded_files<pack
engine/tiers (runtime): reader<read reader<arena spill streaming<tiers
engine/memory (runtime): graph_cache out_of_memory rates<devices reserve<transient_room shared_pool<prompt_room
    shared_pool<memory_segments step_memory
engine/lora (runtime): attached<attached_adapter base_values fewer_ops<short_ops host_adapter<held_adapter layers<lora mixes
    routers store<adapter_store
engine/layers (runtime): embedding<tables linear<leaves linear<unpacked_weights
engine/kv (runtime): int8<hf_kv_int8 kv_cache<hf_slots pages<kv_pages prefix_layout prefix_store
engine/kernels (runtime): attention_and_norms<fused autotune<tuning autotune<compile_ahead
    dequantize<prompt_kernels device_kernels<kernels embed_and_logits<ends gemm4<many_rows gemv4<matvec
    selfcheck<fused_check
engine/batched_lora (runtime): columns<adapter_columns columns<unpacked_columns table<slots
engine/passes (runtime): attention<hf_attention attention<cudnn chunk_forward<hf_prefill chunk_forward<packed_prefill
    media_embeddings<hf_prompt_media prompt_job
engine/families (runtime): chunk<hf_gemma4_chunk last_layers<hf_gemma4_last step<hf_gemma4
engine/decode (runtime): batch_invariant<company decode_step decode_step<batch_state graph_uses<form_uses step_capture step_choice
engine/towers (runtime): bounds_check<tower_check forms<tower_forms graphs<tower_graphs kernels<tower_ops
    pieces<tower_pieces
engine/loader (runtime): anatomy_builder load processor<hf_processor tracing<probe transformers_model<hf
    transformers_model<hf_renames head_kernel<head8_choice
engine/templates (runtime): budget<template_budget costs<template_costs budget<hf_templates
engine/chat (runtime): answer_forms answer_reader call_values content_parts control_tokens marks media
    media_check media_headers prompt<chat control_tokens<turn_end
engine/prefill (runtime): encoder_cache last_token<open_prompts layouts<prompt_layouts packing<packed_prompts
    prefill<prefill_graphs prefix_cache stock_pass<hf_own_pass tower_passes warm_up<capture_ahead
engine/batch (runtime): batch generate kept_batch request<batch_request request<hf_generate request<finite kept_batch<turns
engine/calls (runtime): batch_calls<many conversation embedding hidden_states<inner prompt_logprobs<prompt_scores
engine (runtime): __init__ model_calls<asking model_calls<waiting float16_check memory_shares model model_calls<planned_adapters
    tune<tune_model
. (.): api
merging/changes (merge): delta dequantize<unpack experts inverse<lay_back plan<recipe request
merging/files (merge): layout<shards output_dir<place write<stream
merging (merge): __init__ check check_exact merge report
bridge (bridge): __init__ __init__<inputs attach config hooks inspect inspect_findings inspect_rules live load merging
    row_scales
verification/routes (proof): alarm_rate<criterion child<isolated compare inputs loaded_changes prompts rounding
    runner<routes stock_run<stock_route teacher_forcing<forced trimtab_run<own_route
verification/merges (proof): merge_lane packed_grid retention<survival retention_files<survival_files runs<lane_runs
    stock_merge<stock_lane variants<lanes variants_text<lane_words weights
report (proof): document<cells
verification/render (proof): plots report text<page text<words
verification (proof): __init__ comparisons verify verify<stock_faults
verification/server (proof/remote): __init__ answers channels choosing client faults local measure report tokens
    verdict verify<verify_remote
benchmark (speed): __init__ bandwidth bench chart<picture prepare<prepare_inside report roofline<limit
    run_stock<stock_inside run_trimtab<ours_inside stats<figures stopwatch<clock
doctor/facts (doctor): buckets<draft_buckets bug evidence<draft_evidence probe_kit<kit tiny trackers
doctor/catalogue (doctor/upstream): __init__ a1_meta_item a2_4bit_meta_copy a3_hf_initialized a4_cpu_not_quantized
    a5_nothing_quantized a6_auto_map_quantizes_cpu_layers a7_int8_detach a8_cpu_packing a9_cpu_rows b1_map_discarded
    b2_replan_double_count b3_peft_map_keys b4_shared_kv b5_disk_adapter b6_cwd_copy b7_offload_kwargs b8_wrong_device
    b9_native_load c1_catchall_disk c2_merge_drops_offloaded c3_save_sequential c4_catchall_peak c5_unknown_keys
    c6_prefix_collision c7_device_objects c8_layer_scalar d1_clippable d2_audio_finfo d3_sdpa_audio d4_embed_offload
    d5_cross_device d6_ple e1_missing_keys e2_missing_lowmem e3_extra_keys e4_servers f1_4bit_merge f2_dequant_merge
    f3_other_backends f4_merge_memory f5_safe_merge_bias g1_tied g2_windows h1_quantized_blind h2_vision_fp32
    h3_experts_unquantized h4_skip_list_replaces h5_moe_prequantized h6_request_state i10_merge_bias_scale i11_no_split_set
    i12_cudnn_attention i13_one_key_head i14_frozen_last_token i15_graph_pool i16_row_scales i17_snapshot_references
    i1_window_zero i2_moe_lora_load i3_moe_targets i4_int8_dora_scale i5_lora_only_bias i6_save_by_ending
    i7_per_layer_attribute i8_late_streamer i9_processor_torchvision
doctor/probes (doctor): child<probe_inside runner<probes
doctor/servers (doctor/servers): __init__ identify known known<llama_cpp known<ollama known<sglang known<vllm report
doctor/traces (doctor/traces): __init__ answer classify reading report_block signatures
doctor/cases (doctor): answers<case_answers cases inputs<case_inputs labels packages<case_packages record<case_record
    reference<case_reference runner<matrix runner<case_adapter script<case_script stock_model<case_model
    stock_run<stock_case trimtab_run<line_case
doctor/issues (doctor/issues): __init__ claims</doctor/claims draft</doctor/draft issue markdown merge_parity not_to_file
    owner run</doctor/draft_run scripts</doctor/draft_scripts words</doctor/draft_words
doctor/preflight (doctor): adapter<preflight_adapter answer<preflight_answer answer<preflight_smaller
    device_map<preflight_map findings<preflight_findings peft_dispatch preflight second_plan<preflight_second
    shape<preflight_shape unquantized<preflight_stock
doctor/bisect (doctor): bisect environments<bisect_environments search<bisect_search
doctor (doctor): __init__ report report<report_memory
serve/contract (serve): errors<client_words engine_protocol errors<faults field_names head_lines inside_root<inside job log<journal
    plain_values quotas settings
serve/observe (serve): metrics tracing
serve/media (serve): addresses cut_media fetch media
serve/grammar (serve): call_grammar child<grammar_process constraint prover<grammar_prover schema schema_cost
    source<grammar_source
serve/scheduling (serve): in_progress<budget compiling in_progress media_pool queue<line scheduler
serve/adapters (serve): adapter_cache<shelf
serve/api (serve): body client_errors messages_api messages_shape openai_shape<shapes other_routes<beside routes<request_kinds
    responses<answers responses_api responses_shape schemas<wire to_jobs<asking
serve/worker (serve): answer<reading engine ipc<channel engine<pieces registry row_count supervisor
    prompt_inputs</runtime/media_ahead prompt_inputs<preparing worker
serve/http (serve): app auth<door connection listener live openapi page
serve (serve): __init__ config_file pool run
serve/ray (serve): config<scale deploy<on_ray ingress<front replica
. (.): __init__
cli/flags (commands): flags flags<weights highlight<words_apart opening output<saying pull wording
demo (demo): __init__ demo<line
cli/chat (commands): chat file<chat_file input<chat_input session<chat_session
cli/commands (commands): bench doctor doctor<servers merge_verify<merging models<listing plan_run<line plan_run</show prompts_file
    run_prompts<many serve traces tune verify_server<remote
cli (commands): __init__ main</cli main<examples
. (.): __main__
"""

# former module (place of its former members): new<old; a bare name keeps its name. Of the same arguments, or with more.
MEMBERS = """
runtime/cuts (engine/cuda/launch_config): LaunchConfig<Cut; runtime/prompt_room (engine/memory/shared_pool):
PrefillMemoryPool<PromptRoom; runtime/leaves (engine/layers/linear): StationaryLinear<StillLeaf StagedLinear<StagedLeaf;
runtime/hf_slots (engine/kv/kv_cache): BatchedKVCache<SlotCache; runtime/hf_slots (engine/memory/graph_cache): restore;
runtime/kernels (engine/kernels/device_kernels): DeviceKernels<Kernels; runtime/ends (engine/kernels/embed_and_logits):
with_argmax<with_likeliest argmax_logits<likeliest; runtime/packed_prefill (engine/passes/chunk_forward): Buffers<PackBuffers;
runtime/hf_gemma4 (engine/families/step): TokenPositions<Where; runtime/hf_gemma4 (engine/families/families): why_not ACTIVATIONS;
runtime/hf_gemma4_last (engine/prefill/selection): select_adapter; runtime/hf_gemma4_chunk (engine/prefill/selection): layers_of;
runtime/step_capture (engine/memory/graph_cache): REPLAY_TOLERANCE; runtime/step_capture (engine/tiers/streaming): in_pass;
runtime/probe (engine/loader/tracing): TooLargeError<TooManyModulesError; runtime/marks (engine/chat/control_tokens): turns_of;
runtime/packed_prompts (engine/prefill/packing): PackedPrefill<Packs; runtime/prefill_graphs (engine/prefill/prefill):
PrefillRunner<Prompts; runtime/batch_request (engine/batch/request): SampledToken<Drawn PendingToken<First; runtime/hf_generate
(engine/chat/control_tokens): end_token_ids; runtime/hf_generate (engine/batch/generate): Logprobs; runtime/planned_adapters
(engine/model_calls): match_planned<match read_held<read; runtime/quant (engine/formats/packed): CodeTables PlainShell WideShell
is_narrow widened keep; merge/unpack (merging/changes/dequantize): StoredRows<PackedRows; merge/unpack
(engine/formats/coded_files): INT8_STEP; merge/recipe (checkpoint/folder): check_has_weights; merge/shards (formats/bitsandbytes):
state_json; proof/stock_route (stock/load): without_repacking<without_cpu_repacking; proof/stock_route (stock/unsplit):
loadable_adapter; proof/packed_grid (engine/formats/coded_files): INT8_LEVELS; proof/report (benchmark/report): check_save_path;
doctor/kit (stock/load): without_repacking; doctor/case_model (stock/load): model_class; plan/cost (formats/record): packed_parts
packed_bytes WEIGHT_BLOCK NESTED_BLOCK CODE_BYTES HEAD8 HEAD_PIECE_VALUES; plan/options (planning/placing): ModeRefusedError;
plan/options (planning/candidates): FASTEST_FIRST HEAD8_KL; plan/planner (planning/placing): READ_BUFFER_BYTES; plan/planner
(planning/reasons): UNLIMITED_BYTES; machine/installed (process/packages): deciding_versions<versions; machine/rates_file
(machine/machine_cache): rates_path<path_of read_rates<read write_rates<write; checkpoint/packed (formats/bitsandbytes): STATE
STATE_KEYS NESTED_KEYS BLOCKSIZES STORAGE_BYTES LOGICAL_DTYPES MAX_STATE_BYTES ROW_FORMAT KINDS SIDES; serve/faults
(serve/contract/errors): error_from_worker<told_error; serve/addresses (serve/http/auth): client_network THIS_MACHINE; serve/line
(serve/scheduling/queue): FairQueue<Lines; serve/shelf (serve/adapters/adapter_cache): AdapterCache<AdapterShelf; serve/engine
(serve/worker/prompt_inputs): decoded_bytes; serve/pieces (serve/worker/engine): run_chunk<run; serve/door (serve/http/auth):
AccessMiddleware<Door; serve/front (serve/ray/ingress): Ingress<Front; commands/pull (cli/flags/flags): add_pull
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
    for entry in " ".join(MEMBERS.split()).split("; "):
        head, _, names = entry.partition("): ")
        former, _, place = head.partition(" (")
        for name in names.split():
            new, _, old = name.partition("<")
            found[_dotted(former), old or new] = _dotted(place), new
    return found


def _dotted(path: str) -> str:
    return f"trimtab.{path}".replace("/", ".").removesuffix(".__init__")


class _Folder(ModuleType):
    """A former folder, or a former module with `MEMBERS`, with the names of what replaced it. Where it replaces `trimtab.plan` or
    `trimtab.merge`, it can be called like the function.
    """

    def __getattr__(self, name: str) -> Any:
        new = None if name.startswith("__") else modules().get(self.__name__)
        if new is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        place, present = members().get((self.__name__, name), (new, name))
        value = getattr(importlib.import_module(place), present)
        warnings.warn(
            f"{self.__name__}.{name} is {place}.{present} now; the former name goes with 0.3.0", DeprecationWarning,
            stacklevel=_outside(),
        )  # fmt: skip
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        home = "trimtab.api" if name == "plan" else "trimtab.merging.merge"
        return getattr(importlib.import_module(home), name)(*args, **options)


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
