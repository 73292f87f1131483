"""A plan without torch: what was kept of the machine and of module trees is used when it is exactly right, else not at all."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import trimtab
from tests import anatomies, pico
from tests.raised import refused
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.loader import transformers_model
from trimtab.engine.memory import rates as devices
from trimtab.errors import RequestError
from trimtab.machine import machine_cache
from trimtab.machine.gpus import Gpu
from trimtab.machine.machine_cache import read_anatomy, write_anatomy
from trimtab.planning import Machine, Plan, Rates
from trimtab.planning.plan.contents import FilesRead
from trimtab.process import packages, user_cache
from trimtab.request import LoadRequest

GIB, MIB = 2**30, 2**20
BASE = DEMO / "base"
CARD = Gpu("NVIDIA L4", (8, 9), 58, 24 * GIB, 20 * GIB, (13, 0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "trimtab"


# The anatomy as JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl", "mixtral", "gemma3n"])
def test_an_anatomy_comes_back_equal(family, tmp_path):
    checkpoint = read_checkpoint(pico.build(family, tmp_path / family))
    anatomy = transformers_model.read_anatomy(checkpoint, quant="nf4-dq", dtype="bfloat16")
    assert read_anatomy(write_anatomy(anatomy)) == anatomy


@pytest.mark.parametrize("change", [{"form": 0}, {"rows": [[1]]}, {"anatomy": []}, {"rows": None}, {"kv_layers": [[1, 2]]}])
def test_another_form_of_anatomy_is_no_anatomy(change):
    text = write_anatomy(anatomies.e_series())
    with pytest.raises(ValueError):
        read_anatomy(json.dumps(json.loads(text) | change))


# Kept anatomies -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    model = pico.build("gemma4", tmp_path_factory.mktemp("built") / "model")
    return model, transformers_model.read_anatomy(read_checkpoint(model), quant="nf4-dq", dtype="bfloat16")


@pytest.fixture
def kept(folder, built, tmp_path):
    """Return (checkpoint, request, anatomy) of an entry that was kept."""
    model, anatomy = built
    checkpoint = read_checkpoint(shutil.copytree(model, tmp_path / "model"))
    request = LoadRequest(model=str(checkpoint.folder), quant="nf4-dq")
    machine_cache.keep_anatomy(checkpoint, request, anatomy, compares_values=False)
    assert machine_cache.find_anatomy(checkpoint, request) == anatomy
    return checkpoint, request, anatomy


def entry(folder):
    (path,) = (folder / machine_cache.ANATOMIES).iterdir()
    return path


@pytest.mark.parametrize("change", [{"quant": "none"}, {"dtype": "float16"}, {"keep_unquantized": ("lm_head",)}, {"head": "int8"}])
def test_another_format_is_another_anatomy(change, kept):
    checkpoint, request, _ = kept
    assert machine_cache.find_anatomy(checkpoint, replace(request, **change)) is None


def test_a_budget_or_an_adapter_is_the_same_anatomy(kept):
    checkpoint, request, anatomy = kept
    other = replace(request, gpu_memory_bytes=GIB, context_tokens=7, adapters={"a": "b"}, place={"*": "resident"})
    assert machine_cache.find_anatomy(checkpoint, other) == anatomy


def test_an_anatomy_beyond_the_limit_of_a_file_is_neither_kept_nor_read(kept, folder, monkeypatch):
    checkpoint, request, anatomy = kept
    other, size = replace(request, dtype="float16"), entry(folder).stat().st_size
    monkeypatch.setattr(machine_cache, "MOST_FILE_BYTES", size // 2)
    machine_cache.keep_anatomy(checkpoint, other, anatomy, compares_values=False)
    assert entry(folder).stat().st_size == size  # the one that was kept
    assert machine_cache.find_anatomy(checkpoint, request) is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_changed_config_is_another_anatomy(name, kept):
    checkpoint, request, _ = kept
    file = checkpoint.folder / name
    file.write_text((file.read_text() if file.exists() else "{}") + " ")
    assert machine_cache.find_anatomy(checkpoint, request) is None


def test_another_tensor_is_another_anatomy(kept):
    checkpoint, request, _ = kept
    name, tensor = next(iter(checkpoint.tensors.items()))
    for changed in (replace(tensor, shape=(*tensor.shape, 1)), replace(tensor, dtype="float64")):
        other = replace(checkpoint, tensors={**checkpoint.tensors, name: changed})
        assert machine_cache.find_anatomy(other, request) is None


@pytest.mark.parametrize("package", ["torch", "transformers", "bitsandbytes", "trimtab", "python", "transformers folder"])
def test_another_release_is_another_anatomy(package, kept, monkeypatch):
    checkpoint, request, _ = kept
    changed = {**packages.deciding_versions(), package: "9.9.9"}
    monkeypatch.setattr(machine_cache, "deciding_versions", lambda: changed)
    assert machine_cache.find_anatomy(checkpoint, request) is None


def test_this_package_s_edited_files_are_another_anatomy(kept, monkeypatch):
    checkpoint, request, _ = kept
    monkeypatch.setattr(machine_cache, "_stamp", lambda file: (1, 2))
    assert machine_cache.find_anatomy(checkpoint, request) is None


def test_where_stored_values_decided_only_the_same_weight_files_will_do(kept):
    checkpoint, request, anatomy = kept
    machine_cache.keep_anatomy(checkpoint, request, anatomy, compares_values=True)
    assert machine_cache.find_anatomy(checkpoint, request) == anatomy
    os.utime(checkpoint.files[0], (1, 1))
    assert machine_cache.find_anatomy(read_checkpoint(checkpoint.folder), request) is None


def test_the_loader_s_question_about_values_is_noted(tmp_path, monkeypatch):
    checkpoint = read_checkpoint(pico.build("llama", tmp_path / "llama"))
    assert transformers_model.probe(checkpoint).compares_values is False
    load = transformers_model._load_traced

    def asks(checkpoint, found, config, tensors, dtype, trace):
        first = next(iter(tensors.values()))
        assert torch.equal(first, first)
        return load(checkpoint, found, config, tensors, dtype, trace)

    monkeypatch.setattr(transformers_model, "_load_traced", asks)
    assert transformers_model.probe(checkpoint).compares_values is True


@pytest.mark.parametrize("at", [0, 70, 1000, -1])
def test_a_damaged_entry_is_as_if_it_were_not_there_and_is_replaced(at, kept, folder):
    checkpoint, request, anatomy = kept
    path = entry(folder)
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)
    assert machine_cache.find_anatomy(checkpoint, request) is None
    machine_cache.keep_anatomy(checkpoint, request, anatomy, compares_values=False)
    assert machine_cache.find_anatomy(checkpoint, request) == anatomy


@pytest.mark.parametrize(
    "contents", [b"", b"[]", b"{}", b'{"values_of": null}', b'{"values_of": null, "anatomy": "{}"}', b"[" * 9999]
)
def test_an_entry_of_another_kind_with_a_right_digest_is_as_if_it_were_not_there(contents, kept, folder):
    checkpoint, request, _ = kept
    user_cache.write_own(entry(folder), machine_cache.key_of(checkpoint, request), contents)
    assert machine_cache.find_anatomy(checkpoint, request) is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")
def test_entries_in_a_folder_that_others_can_write_are_not_used(kept, folder):
    checkpoint, request, _ = kept
    (folder / machine_cache.ANATOMIES).chmod(0o777)
    assert machine_cache.find_anatomy(checkpoint, request) is None


def test_a_head_that_cannot_be_in_8_bits_is_asked_about_once(folder, monkeypatch):
    """Else every plan with `--head auto` would import torch to be refused again."""
    request = LoadRequest(model=str(BASE), card="T4", head="auto")
    real = transformers_model.anatomy_of

    def refuse(probe, checkpoint, *, head, **more):
        if head == "int8":
            raise RequestError("no language head", field="head", value="int8")
        return real(probe, checkpoint, head=head, **more)

    monkeypatch.setattr(transformers_model, "anatomy_of", refuse)
    first = trimtab.api.plan_request(request)
    monkeypatch.setattr(transformers_model, "probe", lambda *args: pytest.fail("read again"))
    assert trimtab.api.plan_request(request).execution == first.execution
    checkpoint = read_checkpoint(BASE)
    small = replace(request, quant="nf4-dq", head="int8")
    assert machine_cache.find_refusal(checkpoint, small) == "head='int8': no language head"
    assert machine_cache.find_anatomy(checkpoint, small) is None
    assert machine_cache.find_refusal(checkpoint, replace(small, head="full")) is None


# The machine ----------------------------------------------------------------------------------------------------------


def test_the_build_of_torch_is_read_as_torch_itself_says(monkeypatch):
    code = "import sys; from trimtab.process import packages as i; print(i.deciding_versions()); assert 'torch' not in sys.modules"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(packages.deciding_versions())
    build = packages.torch_build()
    assert build.version == torch.__version__ and build.has_hip == (torch.version.hip is not None)
    assert (".".join(map(str, build.cuda)) if build.cuda else None) == torch.version.cuda


@pytest.fixture
def without_torch(folder, monkeypatch):
    """Say that torch is not loaded, and that this machine's torch was built for CUDA 12.8."""
    monkeypatch.setattr(machine_cache, "torch_is_loaded", lambda: False)
    monkeypatch.setattr(machine_cache, "torch_build", lambda: packages.TorchBuild("2.9", (12, 8), False))
    monkeypatch.setattr(machine_cache.gpus, "read_gpus", lambda: (CARD,))
    machine_cache.write_rates(CARD.name, "2.9", 4, Rates(host_Bps=5e9))
    here = machine_cache.gpu_machine(
        "cuda:0", total_bytes=1, free_bytes=1, process=700 * MIB, capability=(8, 9), multiprocessors=58
    )
    machine_cache.remember(here, bytes_before=100 * MIB, threads=4)


def test_a_gpu_is_known_from_the_driver(without_torch, monkeypatch):
    monkeypatch.setattr(machine_cache, "process_bytes", lambda: 50 * MIB)
    for asked in ("auto", "cuda", "cuda:0"):
        machine, rates = machine_cache.find_machine(asked)
        assert rates == Rates(host_Bps=5e9)
        assert machine == Machine(
            execution_device="cuda:0", gpu_total_bytes=24 * GIB, gpu_free_bytes=20 * GIB - machine_cache.context_bytes(58),
            host_available_bytes=machine.host_available_bytes, context_bytes=machine_cache.context_bytes(58),
            process_bytes=650 * MIB + machine_cache.FIRST_FORWARD_BYTES, capability=(8, 9),
        )  # fmt: skip


def test_a_gpu_that_is_not_there_is_the_same_error_without_torch(without_torch):
    error = refused(machine_cache.find_machine, "cuda:1")
    assert (error.field, error.allowed) == ("device", ("auto", "cpu", "cuda:0"))


@pytest.mark.parametrize(("name", "value"), [
    ("torch_is_loaded", lambda: True), ("torch_build", lambda: None),
    ("torch_build", lambda: packages.TorchBuild("2.9", None, True)),
    ("torch_build", lambda: packages.TorchBuild("2.9", (14, 0), False)),  # newer than the driver
    ("torch_build", lambda: packages.TorchBuild("3.0", (12, 8), False)),  # whose rates were not measured
    ("deciding_versions", lambda: {"torch": "another"}),
])  # fmt: skip
def test_what_is_not_known_for_sure_is_left_to_torch(name, value, without_torch, monkeypatch):
    assert machine_cache.find_machine("auto") is not None
    monkeypatch.setattr(machine_cache, name, value)
    assert machine_cache.find_machine("auto") is None


def test_a_driver_that_does_not_answer_is_left_to_torch(without_torch, monkeypatch):
    monkeypatch.setattr(machine_cache.gpus, "read_gpus", lambda: None)
    assert machine_cache.find_machine("auto") is None


@pytest.mark.parametrize("threads", ["3", "77"])
def test_another_number_of_threads_is_not_known(threads, without_torch, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert machine_cache.find_machine("auto") is None


@pytest.mark.parametrize("facts", [
    {}, [], None, {"added_bytes": "1", "threads": 1}, {"added_bytes": 1, "threads": 1}, {"added_bytes": GIB, "threads": 0},
])  # fmt: skip
def test_facts_that_make_no_sense_are_not_known(facts, without_torch):
    key = machine_cache._key("cuda:0")
    path = user_cache.own_folder(machine_cache.FOLDER) / f"process-{user_cache.hashed(key)}"
    user_cache.write_own(path, key, json.dumps(facts).encode())
    assert machine_cache.find_machine("auto") is None


def test_a_build_without_cuda_asks_no_driver(without_torch, monkeypatch):
    monkeypatch.setattr(machine_cache.gpus, "read_gpus", lambda: pytest.fail("asked"))
    monkeypatch.setattr(machine_cache, "torch_build", lambda: packages.TorchBuild("2.9", None, False))
    with pytest.raises(RequestError):
        machine_cache.find_machine("cuda")


# The whole command ----------------------------------------------------------------------------------------------------

CHILD = """
import sys
from trimtab.cli import main as cli
code = cli.main(sys.argv[1:])
heavy = {"torch", "transformers", "bitsandbytes", "numpy", "trimtab.engine"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Keep, in a folder that child processes use too, what a first plan on this machine keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(devices, "measure_rates", lambda device: Rates())
    trimtab.plan(BASE, card="T4")
    first = trimtab.plan(BASE, device="cpu")
    machine = devices.read_machine("cpu")
    machine_cache.write_rates(devices.device_name("cpu"), str(torch.__version__), torch.get_num_threads(), first.rates)
    machine_cache.remember(machine, bytes_before=0, threads=torch.get_num_threads())
    return first


def child(*arguments):
    return subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder is set by a variable of Linux")
def test_a_plan_in_a_fresh_process_imports_no_torch_and_is_the_same_plan(seen):
    told = child("plan", str(BASE), "--device", "cpu", "--json")
    assert told.returncode == 0, told.stderr
    values, first = json.loads(told.stdout), seen.to_json()
    # What is free changes from one moment to the next.
    free = {"host", "gpu_budget_bytes", "host_budget_bytes", "host_peak_bytes", "request", "held_adapters_limit_bytes"}
    assert {name: value for name, value in values.items() if name not in free} == {
        name: json.loads(json.dumps(value)) for name, value in first.items() if name not in free
    }
    with_adapter = child("plan", str(BASE), "--device", "cpu", "--adapter", f"style={DEMO / 'adapters' / 'style'}")
    assert with_adapter.returncode == 0, with_adapter.stderr
    # A card needs nothing of this machine but its host memory.
    assert child("plan", str(BASE), "--card", "T4").returncode == 0


def test_the_first_load_takes_the_module_tree_that_planning_made_and_a_plan_of_another_dtype_gets_none(folder):
    plan = trimtab.api.plan_request(LoadRequest(model=str(BASE), device="cpu"))
    saved, values = plan.to_json(), dict(vars(plan))
    tree = plan.files_read.look(plan.made_of).tree
    assert tree is not None and plan == Plan.from_json(saved) and "files_read" not in saved
    other = replace(plan, request=replace(plan.request, dtype="float32"))
    assert other.files_read.take(other.made_of) == FilesRead()
    with trimtab.load(plan) as model:
        assert model.hf_model is tree.model
    assert plan.files_read.take(plan.made_of) == FilesRead()
    assert vars(plan) == values  # loading changes nothing of the plan
    with trimtab.load(plan) as model:
        assert model.hf_model is not tree.model


def test_a_plan_from_a_kept_anatomy_is_loaded_like_any_other(folder, monkeypatch):
    request = LoadRequest(model=str(BASE), device="cpu")
    machine, rates = devices.read_machine("cpu"), Rates()
    trimtab.api.plan_request(request)  # keeps the anatomy
    with monkeypatch.context() as patch:
        patch.setattr(machine_cache, "find_machine", lambda *_: (machine, rates))
        patch.setattr(transformers_model, "probe", lambda *args: pytest.fail("read again"))
        plan = trimtab.api.plan_request(request)
    assert plan.files_read.look(plan.made_of).tree is None
    monkeypatch.setattr(transformers_model, "anatomy_of", lambda *args, **options: pytest.fail("made again"))
    # A process that asks torch for the machine is measured with the module tree, which a load takes.
    assert (again := trimtab.api.plan_request(request)).files_read.look(again.made_of).tree is not None
    with trimtab.load(plan) as model:
        assert model.answer("What is this?", max_new_tokens=2).token_ids
