"""The merge: a checkpoint and adapters in, a new checkpoint out, one slice of one tensor in memory at a time."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab._version import __version__
from trimtab.adapters.file import CONFIG_NAME, check_is_adapter
from trimtab.checkpoint.folder import CONFIG, Checkpoint, check_has_weights, check_no_adapter, check_unchanged, read_checkpoint
from trimtab.checkpoint.names import named_options
from trimtab.checkpoint.writer import write_synced
from trimtab.errors import AdapterError, CheckpointError, ParityError, RequestError, TrimtabError
from trimtab.gguf.folders import TABLE
from trimtab.merging.changes.request import AdapterOption, MergeRequest, full_dtype, parts_of
from trimtab.merging.files.output_dir import Workplace, check_place, check_room, disk_error
from trimtab.merging.report import RECORD_NAME, MergedAdapter, MergedFile, MergeReport
from trimtab.process import before_torch, phases
from trimtab.process.json_file import read_own
from trimtab.process.packages import versions_of

if TYPE_CHECKING:
    import torch

    from trimtab.adapters.adapter import AdapterSpec
    from trimtab.merging.files.layout import Shard
    from trimtab.merging.files.write import Work

Progress = Callable[[int, int], None]
WEIGHT_ENDINGS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5",
    ".msgpack", ".onnx", ".onnx_data", ".ot",
)  # fmt: skip
# The table of a GGUF folder, the record of an earlier merge, an adapter that transformers would load, and what says how the
# base's weights were packed (ModelOpt, GPTQ, AWQ, auto-round). Loaders read it where config.json has no quantization_config.
NOT_COPIED = (
    TABLE, RECORD_NAME, CONFIG_NAME, "hf_quant_config.json", "quantize_config.json", "quant_config.json",
    "quantization_config.json",
)  # fmt: skip
# One file uses about four cores and about 40 MiB of chunks, a packed one more. Two plain files are written at once even
# on one core: while one waits for the disk, the other computes.
CORES_A_FILE, MIN_FILES_AT_ONCE, MAX_FILES_AT_ONCE = 4, 2, 4


@named_options
def merge(
    model: str | Path,
    out: str | Path,
    *,
    adapters: Mapping[str, AdapterOption] | Sequence[str | Path] | str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    requantize: str | None = None,
    overwrite: bool = False,
    check: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Write the model with the adapters merged into it as a new checkpoint, and return the report.

    model: a checkpoint folder, a hub id in the local cache, or "demo". out: the new folder; overwrite: replace it if it exists.
    adapters: name -> PEFT folder, name -> (folder, weight), or folders alone; a weight of -1 removes a merged adapter.
    dtype: of every floating-point tensor ("bfloat16", "bf16", torch.bfloat16, ...); None keeps the dtypes of the files.
    requantize: "nf4" or "nf4-dq" writes a bitsandbytes checkpoint. check: read the result again and check every value. progress:
    called with (bytes written, total bytes).
    Errors: RequestError, CheckpointError, AdapterError; DoesNotFitError if the disk has too little space; ParityError of
    the check.
    """
    return merge_request(
        MergeRequest(
            model=os.fspath(model), out=os.fspath(out), adapters=parts_of(adapters or {}), dtype=full_dtype(dtype),
            requantize=requantize, overwrite=overwrite, check=check,
        ),
        progress=progress,
    )  # fmt: skip


def merge_request(request: MergeRequest, *, progress: Progress | None = None) -> MergeReport:
    """Return the report of a merge request (from the command line)."""
    checkpoint = read_checkpoint(request.model)
    out = Path(request.out)
    folders = {part.name: Path(part.path) for part in request.adapters}
    check_place(out, checkpoint.folder, folders, overwrite=request.overwrite)
    if not request.adapters and request.dtype is None and request.requantize is None:
        raise RequestError(
            "none is given, and without dtype= or requantize= the merge would be a copy", field="adapters",
            hint="Give an adapter with adapters=, or set the format of the new checkpoint with dtype= or requantize=",
        )  # fmt: skip
    if not folders:
        check_no_adapter(checkpoint, ())
    for folder in folders.values():
        check_is_adapter(folder, model=request.model)  # before anything that takes long
    phases.begin_imports()
    import_libraries(checkpoint, check=request.check)
    phases.begin("planning")
    started = time.monotonic()  # libraries are imported once in a process: no merge is slower or faster by them
    with ExitStack() as stack:
        work = _prepare(request, checkpoint, stack)
        small = _small_files(checkpoint, work.replaced)
        total = sum(shard.layout.file_bytes for shard in work.shards)
        with Workplace(out, work.key) as place:
            finished = _still_finished(place, work.shards)
            kept = sum(shard.layout.file_bytes for shard in work.shards if shard.name in finished)
            small_bytes = sum(_size(source) for source in small.values())
            check_room(place.out, total - kept + small_bytes)
            try:
                files = _write_shards(work, place, finished, progress, total)
                phases.begin("writing the other files")
                _write_small(small, place.folder)
                check_unchanged(checkpoint)
                report = _report(request, checkpoint, work, files, tuple(small))
                write_synced(place.folder / RECORD_NAME, _json(_with_history(checkpoint, report.record())))
                _check_loads(place.folder, work)
                checked = time.monotonic()
                report = replace(report, seconds=checked - started)
                if request.check:
                    report = _checked(report, work, place.folder, started=checked)
                place.publish(overwrite=request.overwrite)
            except OSError as exc:
                raise disk_error(exc, place.out, needed_bytes=total, is_resumable=bool(place.finished)) from exc
    return report


# What a merge imports where it needs it first.
_LIBRARIES = (
    "torch", "trimtab.engine.loader.transformers_model", "trimtab.merging.changes.plan", "trimtab.merging.files.layout",
    "trimtab.merging.files.write",
)  # fmt: skip
_OF_CHECK = ("trimtab.merging.check",)


def import_libraries(checkpoint: Checkpoint, *, check: bool) -> None:
    """Import what a merge uses, torch and the model's class among it, so that no clock of a merge counts it."""
    for name in (*_LIBRARIES, *(_OF_CHECK if check else ())):
        importlib.import_module(name)
    from trimtab.engine.loader import transformers_model

    with suppress(TrimtabError):  # what is wrong with it is said where it is read
        transformers_model.model_class(checkpoint, transformers_model.read_config(checkpoint))
    before_torch.keep_imports()
    before_torch.collect_again()


# Before the first byte ------------------------------------------------------------------------------------------------


def _prepare(request: MergeRequest, checkpoint: Checkpoint, stack: ExitStack) -> Work:
    from trimtab.engine.loader import transformers_model
    from trimtab.merging.changes import plan
    from trimtab.merging.files import layout
    from trimtab.merging.files.write import Sources, Work

    check_has_weights(checkpoint, "there is nothing to merge into")
    dtype = request.dtype or layout.config_dtype(checkpoint.config)
    probe = transformers_model.probe(checkpoint, dtype)
    anatomy = transformers_model.anatomy_of(probe, checkpoint, quant="none")
    adapters = plan.open_adapters(request.adapters, checkpoint, anatomy, probe, stack)
    hashes = tuple(_hash_adapter(spec.file.peft_folder) for spec in adapters.specs)
    _check_taking_out(checkpoint, request, adapters.specs, hashes)
    sources = Sources(checkpoint, adapters, stack)
    recipe = plan.make_recipe(adapters, checkpoint, probe, sources.rows)
    to_pack: set[str] = set()
    if request.requantize is not None:
        quantized = transformers_model.anatomy_of(probe, _unpacked(checkpoint), quant=request.requantize)
        to_pack = layout.leaves_to_pack(quantized, probe, checkpoint)
    shards = layout.plan_shards(
        checkpoint, probe, recipe, dtype=request.dtype, pack=request.requantize, to_pack=to_pack
    )  # fmt: skip
    replaced: dict[str, bytes] = {}
    config = layout.new_config(checkpoint, dtype=request.dtype, pack=request.requantize, untie=bool(recipe.untied))
    if config is not None:
        replaced[CONFIG] = config
    index = layout.new_index(checkpoint, shards)
    if index is not None:
        replaced[index[0]] = index[1]
    notes = [note for spec in adapters.specs for note in spec.notes]
    notes += [
        f"{path} no longer shares its owner's weight: the adapters do not change both equally, so it gets a separate tensor"
        for path in recipe.untied
    ]
    return Work(shards, sources, replaced, _key(request, checkpoint, hashes), hashes, tuple(notes), recipe.untied)


def _unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as if its packed weights were plain, to find out which weights stock would pack."""
    from trimtab.formats.packed import split_packed

    plain, packed = split_packed(checkpoint)
    if not packed:
        return checkpoint
    tensors = plain | {name: replace(entry.parts["weight"], shape=entry.shape) for name, entry in packed.items()}
    dense = {name: replace(entry, dtype="bfloat16") if name in packed else entry for name, entry in tensors.items()}
    return replace(checkpoint, tensors=dense, quantization=None)


def _hash_adapter(folder: Path) -> dict[str, str]:
    from trimtab.merging.files.write import hash_file

    return {name: hash_file(folder / name) for name in ("adapter_config.json", "adapter_model.safetensors")}


def _check_taking_out(
    checkpoint: Checkpoint, request: MergeRequest, specs: Sequence[AdapterSpec], hashes: Sequence[Mapping[str, str]]
) -> None:
    """Raise AdapterError for an adapter with a negative weight that cannot be removed from the base again."""
    merged = [own.get("files") for own in read_own(checkpoint.folder / RECORD_NAME, "merge record").get("adapters", ())]
    for part, spec, own in zip(request.adapters, specs, hashes, strict=True):
        replaces = [word for word in ("use_dora", "modules_to_save") if spec.file.config.get(word)]
        if part.weight < 0 and dict(own) in merged and replaces:
            raise AdapterError(
                spec.file.folder,
                [f"{', '.join(replaces)}: it replaced values of the base, which cannot be recovered from the merged ones"],
                hint="Merge again from the base, without this adapter",
            )  # fmt: skip


def _key(request: MergeRequest, checkpoint: Checkpoint, hashes: tuple[dict[str, str], ...]) -> str:
    """Return the key of a merge: files, weights, options and versions."""
    values = request.to_json()
    for part, own in zip(values["adapters"], hashes, strict=True):
        part["path"] = own
    content = {
        "request": values, "folder": os.path.realpath(checkpoint.folder), "stamps": checkpoint.stamps,
        "versions": versions(),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the packages that computed the result."""
    own = {"trimtab": __version__, **versions_of(("torch", "transformers"))}
    return {**own, "python": platform.python_version()}


def _small_files(checkpoint: Checkpoint, replaced: Mapping[str, bytes]) -> dict[str, Path | bytes]:
    """Return the other files of the base's folder, by relative path: all but weights and what says how they are packed."""
    files: dict[str, Path | bytes] = {}
    indexes = {stamp[0] for stamp in checkpoint.stamps}
    for folder, inside, names in os.walk(checkpoint.folder):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            place = path.relative_to(checkpoint.folder).as_posix()
            is_weight = name.endswith(WEIGHT_ENDINGS) and place not in indexes
            if name.startswith(".") or is_weight or path in checkpoint.files or place in NOT_COPIED:
                continue
            if path.is_file():
                files[place] = replaced.get(place, path)
    for place, content in replaced.items():
        files[place] = content
    return files


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


# Writing --------------------------------------------------------------------------------------------------------------


def _still_finished(place: Workplace, shards: tuple[Shard, ...]) -> dict[str, dict[str, Any]]:
    """Return the finished files of an earlier run that still match their records; other records are dropped."""
    from trimtab.merging.files.write import hash_file

    kept: dict[str, dict[str, Any]] = {}
    for shard in shards:
        facts, path = place.finished.get(shard.name), place.folder / shard.name
        if facts is None:
            continue
        is_same = path.is_file() and path.stat().st_size == shard.layout.file_bytes
        if is_same and hash_file(path) == facts.get("sha256"):
            kept[shard.name] = facts
        else:
            place.forget(shard.name)
    return kept


def _write_shards(
    work: Work, place: Workplace, finished: Mapping[str, dict[str, Any]], progress: Progress | None, total: int
) -> tuple[MergedFile, ...]:
    import torch

    from trimtab.merging.files.write import Written, use_threads, write_shard

    lock, noting, done = threading.Lock(), threading.Lock(), 0
    count = phases.counting("writing", is_bytes=True)
    is_over = threading.Event()

    def tick(byte_count: int) -> None:
        nonlocal done
        if is_over.is_set():
            raise _StoppedError
        with lock:
            done += byte_count
            count(done, total)
            if progress is not None:
                progress(done, total)

    def write(shard: Shard) -> Written:
        if shard.name in finished:
            facts = finished[shard.name]
            tick(shard.layout.file_bytes)
            return Written(facts["base_sha256"], facts["sha256"], [])
        # Plain files need half of the cores for hashes and copies.
        use_threads(max(1, cores // at_once // (2 if shard.is_plain else 1)))
        path = place.folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write_shard(shard, path, work.sources, tick)
        with noting:  # a separate lock: it waits for the disk while the other threads continue to count
            if not written.problems:
                place.note(shard.name, {"sha256": written.sha256, "base_sha256": written.base_sha256})
        return written

    cores = torch.get_num_threads()
    least = MIN_FILES_AT_ONCE if all(shard.is_plain for shard in work.shards) else 1
    at_once = min(len(work.shards), MAX_FILES_AT_ONCE, max(least, cores // CORES_A_FILE))
    # The largest first, so that none of them runs alone at the end.
    order = sorted(work.shards, key=lambda shard: -shard.layout.file_bytes)
    try:
        with ThreadPoolExecutor(at_once, thread_name_prefix="trimtab-merge") as pool:
            futures = {shard.name: pool.submit(write, shard) for shard in order}
            try:
                wait(futures.values(), return_when=FIRST_EXCEPTION)
                for future in futures.values():
                    if future.done():
                        future.result()  # raises the original error: no other file was stopped before
            finally:
                is_over.set()
                for future in futures.values():
                    future.cancel()
    finally:
        use_threads(cores)
    files = [futures[shard.name].result() for shard in work.shards]
    problems = [problem for written in files for problem in written.problems]
    if problems:
        specs = work.sources.adapters.specs
        if not specs:
            raise CheckpointError("; ".join(problems), path=work.sources.checkpoint.path)
        raise AdapterError(specs[0].file.folder, problems)
    return tuple(
        MergedFile(shard.name, shard.layout.file_bytes, new.sha256, new.base_sha256, shard.name in finished)
        for shard, new in zip(work.shards, files, strict=True)
    )


class _StoppedError(Exception):
    """A file is abandoned because another one failed or the user stopped the merge."""


def _write_small(small: Mapping[str, Path | bytes], folder: Path) -> None:
    for name, source in small.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            write_synced(path, source)
        else:
            shutil.copyfile(source, path)
            with open(path, "rb+") as handle:
                os.fsync(handle.fileno())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _with_history(checkpoint: Checkpoint, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record, with the record of the base inside if the base is a merged model itself."""
    before = read_own(checkpoint.folder / RECORD_NAME, "merge record")
    return record | {"base_record": before} if before else record


# After writing --------------------------------------------------------------------------------------------------------


def _check_loads(folder: Path, work: Work) -> None:
    """Raise CheckpointError unless stock's loader can fill the model from the new files, untied if necessary."""
    from trimtab.engine.loader import transformers_model
    from trimtab.merging.files import layout

    checkpoint = read_checkpoint(folder)
    if not work.untied and _reads_as(checkpoint) == _reads_as(work.sources.checkpoint):
        return  # the loader's answer for the base is valid for these files too
    probe = transformers_model.probe(checkpoint, layout.config_dtype(checkpoint.config))
    still = [path for path in work.untied if path in probe.ties]
    if still:
        raise CheckpointError(
            f"transformers ties {', '.join(still)} regardless of the config, so a change of one of the two cannot be written",
            path=work.sources.checkpoint.path, hint="Load the adapter unmerged",
        )  # fmt: skip


def _reads_as(checkpoint: Checkpoint) -> Any:
    """Return everything that a loader reads of a checkpoint before its weights."""
    tensors = {name: (entry.dtype, entry.shape, entry.file.name) for name, entry in checkpoint.tensors.items()}
    return checkpoint.config, tensors


def _report(
    request: MergeRequest, checkpoint: Checkpoint, work: Work, files: tuple[MergedFile, ...], copied: tuple[str, ...]
) -> MergeReport:
    outs = [out for shard in work.shards for out in shard.outs]
    changed = tuple(out.tensor_name for out in outs if any(edit.asks for edit in out.edits))
    added = tuple(out.tensor_name for out in outs if out.tensor_name not in checkpoint.tensors)
    adapters = []
    for part, spec, hashes in zip(request.adapters, work.sources.adapters.specs, work.adapter_hashes, strict=True):
        scales = Counter(f"{target.scale:g}" for target in spec.targets if target.kind != "saved")
        adapters.append(
            MergedAdapter(
                part.name, Path(os.path.realpath(part.path)).name, part.weight, len(spec.targets),
                len(spec.no_effect), dict(sorted(scales.items())), hashes,
            )
        )  # fmt: skip
    return MergeReport(
        str(request.out), Path(os.path.realpath(checkpoint.folder)).name, tuple(adapters), files, copied, changed,
        len(outs) - len(set(changed) | set(added)), added, request.dtype, request.requantize, versions(), work.notes,
    )  # fmt: skip


def _checked(report: MergeReport, work: Work, folder: Path, *, started: float) -> MergeReport:
    from trimtab.merging.check import check_files

    checked = check_files(work, read_checkpoint(folder))
    report = replace(report, check=checked, check_seconds=time.monotonic() - started)
    if not checked.passed:
        names = [tensor.problem for tensor in checked.changed if not tensor.is_applied]
        names += [f"{name} is not the base's" for name in checked.not_equal]
        error: TrimtabError = ParityError(
            f"{len(names)} tensors of the merged model are wrong: {', '.join(names[:20])}", position=0,
            max_abs=checked.error_ulps, mean_abs=0.0, tolerance=0.5,
        )  # fmt: skip
        raise error
    return report
