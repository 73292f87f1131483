"""Whether a checkpoint is made of the files that transformers would read, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.raised import raised
from trimtab.checkpoint.folder import check_unchanged, find_folder, hub_cache, read_checkpoint
from trimtab.errors import CheckpointError

REVISION = "0123456789abcdef0123456789abcdef01234567"


def safetensors(names: tuple[str, ...] = ("a",)) -> bytes:
    """Return a file of one-byte tensors."""
    tensors = {name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at, name in enumerate(names)}
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(len(names))


def index(weight_map: Mapping[str, Any]) -> bytes:
    return json.dumps({"metadata": {"total_size": 2}, "weight_map": weight_map}).encode()


def folder_of(folder: Path, files: Mapping[str, bytes], config: Mapping[str, Any] | None = None) -> Path:
    """Write a folder with a config.json (unless files has one) and the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config.json": json.dumps(config or {"model_type": "llama"}).encode()} | dict(files)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


INDEX = "model.safetensors.index.json"
SHARDS = {
    "one.safetensors": safetensors(("a",)), "two.safetensors": safetensors(("b", "c")),
    INDEX: index({"a": "one.safetensors", "b": "two.safetensors"}),
}  # fmt: skip


def sharded(folder: Path, **more: bytes) -> Path:
    return folder_of(folder, SHARDS | more)


def refusal(model: str | Path) -> CheckpointError:
    return raised(CheckpointError, read_checkpoint, model)


@pytest.fixture(autouse=True)
def _no_network_and_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


# Which files ----------------------------------------------------------------------------------------------------------


def test_single_file_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"model.safetensors": safetensors(("a", "b"))}, {"model_type": "x", "n": 1})
    found = read_checkpoint(folder)
    assert (found.folder, found.config, found.files) == (folder, {"model_type": "x", "n": 1}, (folder / "model.safetensors",))
    assert (list(found.tensors), found.has_weights, found.quantization) == (["a", "b"], True, None)
    assert found.tensors["a"].file == folder / "model.safetensors"


def test_text_is_as_good_as_a_path(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"model.safetensors": safetensors()})
    assert read_checkpoint(str(folder)) == read_checkpoint(folder)


# Files, what the config names, and what is read of them.
READ: list[tuple[dict[str, bytes], str | None, list[str], str]] = [
    (SHARDS | {"model.safetensors": safetensors(("single",))}, None, ["model.safetensors"], "single"),
    (SHARDS, None, ["one.safetensors", "two.safetensors"], "a b c"),  # c is in a file of the index, not in its map
    (SHARDS | {INDEX: index({"a": "one.safetensors", "b": "two.safetensors", "c": "./two.safetensors"})}, None,
     ["one.safetensors", "two.safetensors"], "a b c"),
    (SHARDS | {"consolidated.safetensors": b"broken", "three.safetensors": b"", "old.bin": b""}, None,
     ["one.safetensors", "two.safetensors"], "a b c"),
    ({"other.safetensors": safetensors(("other",)), "model.safetensors": safetensors()}, "other.safetensors",
     ["other.safetensors"], "other"),
    ({"pytorch_model.bin": b"", "model.safetensors": safetensors()}, None, ["model.safetensors"], "a"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "named", "read", "tensors"), READ)
def test_the_files_that_config_and_index_name_are_read_and_no_others(
    tmp_path: Path, files: dict[str, bytes], named: str | None, read: list[str], tensors: str
) -> None:
    folder = folder_of(tmp_path / "m", files, None if named is None else {"transformers_weights": named})
    found = read_checkpoint(folder)
    assert sorted(found.files) == [folder / name for name in read] and sorted(found.tensors) == tensors.split()


def test_shards_in_a_folder_below_keep_their_path_in_the_stamps(tmp_path: Path) -> None:
    files = {"sub/one.safetensors": safetensors(), "model.safetensors.index.json": index({"a": "sub/one.safetensors"})}
    found = read_checkpoint(folder_of(tmp_path / "m", files))
    assert [name for name, *_ in found.stamps] == ["config.json", "model.safetensors.index.json", "sub/one.safetensors"]
    check_unchanged(found)


def test_config_names_another_index_and_it_is_checked(tmp_path: Path) -> None:
    files = {"x.safetensors": safetensors(("a",)), "x.safetensors.index.json": index({"a": "x.safetensors", "b": "x.safetensors"})}
    folder = folder_of(tmp_path / "m", files, {"transformers_weights": "x.safetensors.index.json"})
    error = refusal(folder)
    assert error.path == str(folder / "x.safetensors.index.json") and "b (in x.safetensors)" in str(error)
    (folder / "x.safetensors").write_bytes(safetensors(("a", "b")))
    assert set(read_checkpoint(folder).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "files", [{}, {"training_args.bin": b"", "optimizer.pt": b"", "rng_state_0.pth": b"", "x.py": b""}], ids=len
)
def test_config_alone_is_a_checkpoint_without_weights(tmp_path: Path, files: dict[str, bytes]) -> None:
    found = read_checkpoint(folder_of(tmp_path / "m", files))
    assert (found.has_weights, found.files, found.tensors) == (False, (), {})
    assert [name for name, *_ in found.stamps] == ["config.json"]


@pytest.mark.parametrize("place", ["top", "text"])
def test_quantization_is_found_at_the_top_and_in_the_text_config(tmp_path: Path, place: str) -> None:
    wanted = {"quant_method": "bitsandbytes"}
    config = {"quantization_config": wanted} if place == "top" else {"text_config": {"quantization_config": wanted}}
    assert read_checkpoint(folder_of(tmp_path / "m", {}, config)).quantization == wanted


def test_empty_quantization_is_none(tmp_path: Path) -> None:
    assert read_checkpoint(folder_of(tmp_path / "m", {}, {"quantization_config": {}})).quantization is None


@pytest.mark.parametrize("shards", [False, True])
def test_the_files_are_those_that_transformers_chooses(tmp_path: Path, shards: bool) -> None:
    from transformers import modeling_utils

    folder = sharded(tmp_path / "m", **({} if shards else {"model.safetensors": safetensors()}))
    chosen, _ = modeling_utils._get_resolved_checkpoint_files(
        folder, variant=None, gguf_file=None, use_safetensors=None, user_agent=None, is_remote_code=False,
        download_kwargs={"local_files_only": True},
    )  # fmt: skip
    assert [Path(file) for file in chosen] == list(read_checkpoint(folder).files)


# What is refused ------------------------------------------------------------------------------------------------------


def test_no_such_folder_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in str(refusal(tmp_path / "none"))


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    assert "is a file; give the folder" in str(refusal(tmp_path / "model.safetensors"))


def test_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_of(tmp_path / "m", {}))
    assert "the name is empty" in str(refusal(""))
    assert read_checkpoint(".").config == {"model_type": "llama"}


@pytest.mark.parametrize(
    "model", ["x" * 5000, "a\0b", "a" * 300 + "/b", "../../x", "C:\\models\\x", "a/../b", ".../x"], ids=str.__len__
)
def test_any_text_that_is_no_folder_is_refused(model: str) -> None:
    assert refusal(model).path == model


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    assert "has no config.json" in str(refusal(tmp_path))
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    error = refusal(tmp_path)
    assert "is an adapter, not a model" in str(error) and "base model" in error.hint


ONE = {"model.safetensors": safetensors()}
MLX = {"quantization": {"group_size": 64, "bits": 4}}
OUTSIDE = ("../x.safetensors", "/etc/x.safetensors", "sub/../../x", "..\\x", "C:\\x", "C:x", "\\\\host\\x", "", ".", "a\0b")
MIXED_UP = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}
# Files, a config, the file that the error names ("": the folder), what it says.
REFUSED: list[tuple[dict[str, bytes], Any, str, tuple[str, ...]]] = [
    *((ONE | {"config.json": text}, None, "config.json", (words,)) for text, words in (
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff{}", "not JSON"), (b"[]", "not a JSON object"), (b"[" * 50_000, "not JSON"),
        (b"null", "not a JSON object"),
    )),
    ({}, {"quantization_config": "nf4"}, "config.json", ("quantization_config is not an object",)),
    *((ONE, config, "", (f"packed for {words}", "Use a GGUF file")) for config, words in (
        (MLX, "MLX"), (MLX | {"quantization_config": MLX["quantization"]}, "MLX"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, "ExLlama (EXL2)"),
        ({"quantization_config": {"quant_method": "exl3"}}, "ExLlama (EXL3)"),
    )),
    *((ONE, {"transformers_weights": name}, "config.json", (f"transformers_weights is {name!r}",))
      for name in ("x.bin", "", 1, ["x.safetensors"], "x.safetensors.index")),
    (ONE, {"transformers_weights": "x.safetensors"}, "config.json", ("names x.safetensors, which is missing",)),
    ({}, {"transformers_weights": "../x.safetensors"}, "config.json", ("names a file outside its folder",)),
    *(({INDEX: index({"a": name})}, None, INDEX, (f"names a file outside its folder: {name!r}",)) for name in OUTSIDE),
    *(({INDEX: text}, None, INDEX, ("has no weight_map",))
      for text in (b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}')),
    ({INDEX: SHARDS[INDEX]}, None, "", ("2 of 2 shards are missing: one.safetensors, two.safetensors", "download them again")),
    ({INDEX: index({"a": "x" * 5000})}, None, "", ("1 of 1 shards are missing",)),
    (SHARDS | {INDEX: index(MIXED_UP)}, None, INDEX,
     ("names tensors that are not in that file: b (in one.safetensors) (and 1 more: d (in two.safetensors))",)),
    (SHARDS | {"two.safetensors": safetensors(("a", "b"))}, None, "two.safetensors", ("tensor a: is in one.safetensors as well",)),
    (SHARDS | {"two.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, None, "two.safetensors", ("Git LFS",)),
    *(({name: b"", "training_args.bin": b""}, None, "", (f"only as pickle ({name})", "Convert it to safetensors"))
      for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt")),
    *(({name: safetensors()}, None, "", (f"has {name}, but neither model.safetensors nor {INDEX}",))
      for name in ("model-00001-of-00002.safetensors", "consolidated.safetensors", "m-Q4_K_M.gguf")),
]  # fmt: skip


@pytest.mark.parametrize(("files", "config", "named", "words"), REFUSED)
def test_what_is_no_checkpoint_is_refused_by_its_file(
    tmp_path: Path, files: dict[str, bytes], config: Any, named: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors())
    error = refusal(folder_of(tmp_path / "m", files, config))
    assert error.path == str(tmp_path / "m" / named) and all(one in str(error) for one in words)


def test_json_over_the_limit_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {})
    with open(folder / "config.json", "r+b") as handle:
        handle.truncate(2**31)  # sparse: takes no disk
    assert "has more than 4000000 B" in str(refusal(folder))


# Unchanged ------------------------------------------------------------------------------------------------------------


def test_untouched_checkpoint_is_unchanged(tmp_path: Path) -> None:
    check_unchanged(read_checkpoint(sharded(tmp_path / "m")))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors"])
def test_new_modification_time_is_a_change(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "m")
    found = read_checkpoint(folder)
    os.utime(folder / name, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"changed since it was read: {name}"):
        check_unchanged(found)


def test_new_size_is_a_change_even_at_the_old_time(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    found, before = read_checkpoint(folder), (folder / "one.safetensors").stat().st_mtime_ns
    (folder / "one.safetensors").write_bytes(safetensors(("a", "z")))
    os.utime(folder / "one.safetensors", ns=(before, before))
    with pytest.raises(CheckpointError, match=r"changed since it was read: one\.safetensors"):
        check_unchanged(found)


def test_removed_files_are_all_changes(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    found = read_checkpoint(folder)
    (folder / "one.safetensors").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"changed since it was read: config\.json, one\.safetensors"):
        check_unchanged(found)


# The hub cache --------------------------------------------------------------------------------------------------------


def cached(cache: Path, name: str = "models--org--tiny", *, revisions: tuple[str, ...] = (REVISION,), main: str | None) -> Path:
    """Write a hub-cache folder whose snapshots are links into blobs, as on every system with symbolic links."""
    folder = cache / name
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "c").write_bytes(b'{"model_type": "llama"}')
    (folder / "blobs" / "w").write_bytes(safetensors())
    for revision in revisions:
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for file, blob in (("config.json", "c"), ("model.safetensors", "w")):
            try:
                (snapshot / file).symlink_to(f"../../blobs/{blob}")
            except OSError:  # Windows without the right to make links: the hub copies there
                (snapshot / file).write_bytes((folder / "blobs" / blob).read_bytes())
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main, encoding="utf-8")
    return folder


def test_snapshot_of_links_into_blobs_is_read(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, main=REVISION) / "snapshots" / REVISION
    found = read_checkpoint(snapshot)
    assert (found.folder, list(found.tensors)) == (snapshot, ["a"])
    check_unchanged(found)


@pytest.mark.parametrize("main", [REVISION, REVISION + "\n", None])
def test_cache_folder_leads_to_its_snapshot(tmp_path: Path, main: str | None) -> None:
    folder = cached(tmp_path, main=main)
    assert read_checkpoint(folder).folder == folder / "snapshots" / REVISION


def test_cache_folder_is_known_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cached(tmp_path, main=REVISION))
    assert list(read_checkpoint(".").tensors) == ["a"]


def test_folder_with_a_config_is_a_checkpoint_whatever_its_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "models--org--copied", {"model.safetensors": safetensors()})
    assert read_checkpoint(folder).folder == folder


def test_main_chooses_among_snapshots(tmp_path: Path) -> None:
    folder = cached(tmp_path, revisions=("a" * 40, REVISION, "b" * 40), main=REVISION)
    assert find_folder(folder) == folder / "snapshots" / REVISION


@pytest.mark.parametrize("hub_id, name", [("org/tiny", "models--org--tiny"), ("gpt2", "models--gpt2")])
def test_hub_id_is_looked_up_in_the_cache(tmp_path: Path, hub_id: str, name: str) -> None:
    folder = cached(tmp_path / "hub", name, main=REVISION)
    assert read_checkpoint(hub_id).folder == folder / "snapshots" / REVISION


def test_a_path_of_three_names_is_no_hub_id(tmp_path: Path) -> None:
    cached(tmp_path / "hub", "models--a--b--c", main=REVISION)
    assert "no such folder" in str(refusal("a/b/c"))


def test_a_gguf_file_that_is_not_there_is_no_folder() -> None:
    assert "no such file" in str(refusal("./nothing.gguf"))


def test_folder_wins_over_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "hub", main=REVISION)
    folder_of(tmp_path / "org" / "tiny", {}, {"model_type": "local"})
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint("org/tiny").config == {"model_type": "local"}


def test_the_snapshot_is_the_one_that_huggingface_hub_finds(tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    cached(tmp_path / "hub", revisions=("a" * 40, REVISION), main=REVISION)
    known = snapshot_download("org/tiny", cache_dir=tmp_path / "hub", local_files_only=True)
    assert find_folder("org/tiny") == Path(known)


@pytest.mark.parametrize("model", ["org/none", "none"])
def test_hub_id_that_is_not_cached_is_refused_with_how_to_get_it(tmp_path: Path, model: str) -> None:
    error = refusal(model)
    assert error.path == model and "nothing is downloaded automatically" in str(error)
    assert str(tmp_path / "hub") in str(error) and f"trimtab pull {model}" in error.hint


@pytest.mark.parametrize(
    ("model", "meant"), [("dmo", "demo"), ("Demo", "demo"), ("org/tinny", "org/tiny"), ("tiny", "org/tiny"), ("gpt2", "")]
)
def test_a_mistyped_model_means_the_demo_or_a_cached_one(tmp_path: Path, model: str, meant: str) -> None:
    cached(tmp_path / "hub", "models--org--tiny", main=REVISION)
    assert refusal(model).hint.partition("Fetch it")[0] == (f"Did you mean {meant}? " if meant else "")


def test_cache_without_main_and_two_snapshots_is_refused_with_both(tmp_path: Path) -> None:
    error = refusal(cached(tmp_path, revisions=("a1", "b2"), main=None))
    assert "has no refs/main to choose among 2 snapshots; it has a1, b2" in str(error)
    assert "Give the folder of one snapshot" in error.hint


def test_cache_without_snapshots_is_refused(tmp_path: Path) -> None:
    assert "among 0 snapshots; it has none" in str(refusal(cached(tmp_path, revisions=(), main=None)))


@pytest.mark.parametrize("main", ["f" * 40, "..", ".", "", f"../snapshots/{REVISION}", "/"])
def test_main_that_names_no_snapshot_is_refused(tmp_path: Path, main: str) -> None:
    assert f"refs/main names the snapshot {main!r}; it has {REVISION}" in str(refusal(cached(tmp_path, main=main)))


def test_main_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = cached(tmp_path, main="")
    (folder / "refs" / "main").write_bytes(b"\xff\xfe")
    assert "cannot be read" in str(refusal(folder))


@pytest.mark.skipif(sys.platform == "win32", reason="making links needs a right that Windows rarely gives")
def test_link_to_a_blob_that_is_not_there_is_refused_not_taken_for_no_weights(tmp_path: Path) -> None:
    folder = cached(tmp_path, main=REVISION)
    (folder / "blobs" / "w").unlink()
    error = refusal(folder)
    assert error.path == str(folder / "snapshots" / REVISION / "model.safetensors") and "a broken link" in str(error)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "~/a", "HUGGINGFACE_HUB_CACHE": "b", "HF_HOME": "c"}, "home/a"),
        ({"HUGGINGFACE_HUB_CACHE": "$HOME/b", "HF_HOME": "c"}, "home/b"),
        ({"HF_HOME": "~/c", "XDG_CACHE_HOME": "d"}, "home/c/hub"),
        ({"XDG_CACHE_HOME": "~/d"}, "home/d/huggingface/hub"),
        ({}, "home/.cache/huggingface/hub"),
    ],
    ids=["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "none"],
)  # fmt: skip
def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in ({"HOME": str(tmp_path / "home"), "USERPROFILE": str(tmp_path / "home")} | variables).items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == tmp_path / expected
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert hub_cache() == Path(done.stdout.strip())


def test_a_damaged_gguf_file_is_called_that(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        assert raised(CheckpointError, read_checkpoint, str(path), match="ends within its version").path == str(file)
    # Beside a checkpoint such files are somebody else's.
    (tmp_path / "config.json").write_text("{}")
    assert find_folder(str(tmp_path)) == tmp_path
