"""What is downloaded from a hub, on request only?"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from trimtab.adapter_names import MODEL
from trimtab.checkpoint.folder import CONFIG, INDEX, SINGLE, check_not_foreign, hub_cache
from trimtab.checkpoint.unreadable import address_hint
from trimtab.errors import CheckpointError, RequestError, gib
from trimtab.gguf.companion import is_model_file
from trimtab.gguf.header import SPLIT
from trimtab.process.json_file import read_json, read_object

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Whole names; a name with a folder matches none of them.
_SMALL = re.compile(
    r"(config|generation_config|adapter_config|(?:video_|image_)?(?:pre)?processor_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|chat_template|model\.safetensors\.index)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|tokenizer\.model|tekken\.json|LICEN[CS]E(\.txt|\.md)?"
)
_SHARD = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_GGUF = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/){0,3}[A-Za-z0-9_][A-Za-z0-9._-]*\.gguf", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Larger files are no config or index.
MOST_JSON_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Pulled:
    """The downloaded snapshot. folder: its path, or that of a GGUF file that was named. revision: its commit. license: from the
    hub, None without one.

    bytes: of all files; fetched_bytes: those that were not in the cache before.
    """

    model: str
    folder: Path
    revision: str
    license: str | None
    files: tuple[str, ...]
    bytes: int
    fetched_bytes: int


def pull(
    model: str, *, revision: str | None = None, say: Callable[[str], None] | None = None, endpoint: str | None = None
) -> Pulled:
    """Fetch a model or adapter from a hub (HF_ENDPOINT, huggingface.co by default) into the local cache.

    revision: a branch, tag or commit, "main" if None. say: called with the license and with each file. Errors: RequestError for a
    name that is no hub id, if the hub is switched off (HF_HUB_OFFLINE) or unreachable, or the disk has too little free space;
    CheckpointError for a repository without safetensors. After a kill the next pull keeps whole files; huggingface_hub 2 restarts
    the interrupted one, because its temporary files belong to one process.
    """
    if model == MODEL:
        raise RequestError("is part of trimtab and needs no download", field="model", value=model)
    emit = say or (lambda text: None)
    branch = revision or "main"
    try:
        return _pull(model, branch, emit, endpoint)
    except HFValidationError as exc:
        raise RequestError(
            "is not a hub id of the form OWNER/NAME", field="model", value=model, hint=address_hint(model, takes_hub_id=True)
        ) from exc
    except OfflineModeIsEnabled as exc:
        raise RequestError("the hub is switched off: HF_HUB_OFFLINE is set", field="model", value=model) from exc
    except HfHubHTTPError as exc:
        status: Any = getattr(exc.response, "status_code", None)
        hint = {401: "Log in with `hf auth login`", 403: "Accept the license on the model's page, then `hf auth login`"}
        why = {404: f"the hub has no such model or revision ({branch})"}.get(status, f"the hub refuses it ({status})")
        raise RequestError(why, field="model", value=model, hint=hint.get(status, "")) from exc
    except (LocalEntryNotFoundError, OSError, _transport_error()) as exc:
        raise RequestError(f"cannot be fetched ({_first_line(exc)})", field="model", value=model) from exc


def _pull(model: str, branch: str, emit: Callable[[str], None], endpoint: str | None) -> Pulled:
    api = huggingface_hub.HfApi(endpoint=endpoint)
    model, _, file = _of_file(model)
    info = api.model_info(model, revision=branch, files_metadata=True)
    commit = str(info.sha or "")
    if not _COMMIT.fullmatch(commit):
        raise CheckpointError("the hub names no commit for it", path=model)
    sizes = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
    license_name = _license_of(info)
    emit(f"{model} at {commit}; license: {license_name or 'none stated'}")

    def fetch(name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(model, name, revision=commit, endpoint=endpoint))

    small = [] if file else sorted(name for name in sizes if _SMALL.fullmatch(name))
    packed = sorted(name for name in sizes if _GGUF.fullmatch(name) and is_model_file(Path(name)))
    if file:
        parts = _parts_of(model, file, sizes, packed)
        projectors = sorted(name for name in sizes if _GGUF.fullmatch(name) and Path(name).name.lower().startswith("mmproj"))
        if projectors:
            is_one = "is a projector" if file in projectors else f"for images, with a projector ({', '.join(projectors[:3])})"
            emit(f"{file} {is_one}: with both files in the cache, {model} is the model for images (Gemma 4: with its config.json)")
    elif packed and not {SINGLE, INDEX, ADAPTER_CONFIG} & sizes.keys():
        raise CheckpointError(
            f"the repository has GGUF files ({', '.join(packed[:8])}{', ...' if len(packed) > 8 else ''})", path=model,
            hint=f"Name one of them: `trimtab pull {model}/{packed[0]}`",
        )  # fmt: skip
    elif CONFIG not in small and ADAPTER_CONFIG not in small:
        raise CheckpointError(f"the repository has neither {CONFIG} nor {ADAPTER_CONFIG}", path=model)
    large = [name for name in small if sizes[name] > MOST_JSON_BYTES]
    if large:
        raise CheckpointError(f"{large[0]} has {gib(sizes[large[0]])}, which is no {Path(large[0]).suffix} file", path=model)
    missing = [name for name in small if not _is_cached(model, name, commit)]
    _check_room(model, sum(sizes[name] for name in missing))
    for name in small:
        fetch(name)
    if CONFIG in small:
        check_not_foreign(read_object(fetch(CONFIG), CONFIG), model)
    weights = parts if file else _weight_files(model, sizes, small, fetch)
    missing += [name for name in weights if not _is_cached(model, name, commit)]
    _check_room(model, sum(sizes[name] for name in missing if name in weights))
    for number, name in enumerate(weights, 1):
        is_there = name not in missing
        emit(f"{number}/{len(weights)} {name}, {gib(sizes[name])}{': is there' if is_there else ''}")
        fetch(name)
    folder = fetch(weights[0]) if file else fetch(small[0]).parent
    if branch != commit:
        _record(model, branch, commit)
    files = (*small, *weights)
    return Pulled(
        model, folder, commit, license_name, files, sum(sizes[name] for name in files), sum(sizes[name] for name in missing)
    )  # fmt: skip


def _of_file(model: str) -> tuple[str, str, str]:
    """Return (OWNER/NAME, "/", FILE) of OWNER/NAME/FILE.gguf, and a hub id with two empty texts."""
    owner, _, rest = model.partition("/")
    name, slash, file = rest.partition("/")
    return (f"{owner}/{name}", slash, file) if file.lower().endswith(".gguf") else (model, "", "")


def _parts_of(model: str, file: str, sizes: dict[str, int], packed: list[str]) -> list[str]:
    """Return a GGUF file and the others of its set. Errors: CheckpointError for files that the repository does not have."""
    if file not in sizes or not _GGUF.fullmatch(file):
        raise CheckpointError(
            f"the repository has no {file!r:.200}; its GGUF files are {', '.join(packed[:8]) or 'none'}", path=model,
        )  # fmt: skip
    named = SPLIT.fullmatch(file)
    if named is None:
        return [file]
    others = ((other, SPLIT.fullmatch(other)) for other in sorted(filter(_GGUF.fullmatch, sizes)))
    found = [other for other, parts in others if parts and (parts[1], parts[3]) == (named[1], named[3])]
    if len(found) != int(named[3]):
        raise CheckpointError(f"the repository has {len(found)} of the {int(named[3])} files of {file!r:.200}", path=model)
    return found


def _license_of(info: Any) -> str | None:
    card = getattr(info, "card_data", None)
    stated = getattr(card, "license_name", None) or getattr(card, "license", None)
    if stated is None:
        stated = next((tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")), None)
    return None if stated is None else str(stated)


def _weight_files(
    model: str, sizes: dict[str, int], small: list[str], fetch: Callable[[str], Path]
) -> list[str]:  # fmt: skip
    """Return the weight files that the repository's own config or index names. Errors: CheckpointError."""
    if ADAPTER_CONFIG in small and ADAPTER_WEIGHTS in sizes and CONFIG not in small:
        return [ADAPTER_WEIGHTS]
    if SINGLE in sizes:
        return [SINGLE]
    if INDEX not in small:
        raise CheckpointError(
            "the repository has no safetensors weights; pickles are never fetched", path=model,
            hint="Ask its owner for safetensors, or convert it elsewhere",
        )  # fmt: skip
    try:
        named = read_json(fetch(INDEX), "index")["weight_map"].values()
        names = sorted({str(name) for name in named})
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"its index cannot be read ({exc})", path=f"{model}/{INDEX}") from exc
    for name in names:
        if not _SHARD.fullmatch(name) or name not in sizes:
            raise CheckpointError(f"its index names {name!r}, which is not one of its weight files", path=f"{model}/{INDEX}")
    return names


def _is_cached(model: str, name: str, commit: str) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(model, name, revision=commit), str)


def _check_room(model: str, needed: int) -> None:
    """Raise RequestError if the disk of the cache has too little free space."""
    folder = hub_cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RequestError(
            f"needs {gib(needed)} in {hub_cache()}, the disk has {gib(free)} free", field="model", value=model,
            hint="HF_HOME sets another folder",
        )  # fmt: skip


def _record(model: str, name: str, commit: str) -> None:
    """Make a branch or tag of the cache point to a commit, as huggingface_hub does: a hub id means `refs/main`."""
    path = hub_cache() / "--".join(("models", *model.split("/"))) / "refs" / name
    if not path.resolve().is_relative_to(path.parents[len(Path(name).parts) - 1].resolve()):
        raise RequestError("is not a revision name", field="revision", value=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, encoding="utf-8")


def _transport_error() -> type[Exception]:
    """Return the exception class of a lost connection: huggingface_hub 1 uses httpx, 2 its successor httpx2."""
    package = sys.modules[type(huggingface_hub.get_session()).__module__.partition(".")[0]]
    kind: type[Exception] = package.HTTPError
    return kind


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
