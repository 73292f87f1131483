"""Values that are not numbers: an adapter that holds some is refused when it is read, logits that are some end the answer."""

import io
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
import trimtab.demo as demo
from tests.raised import raised
from trimtab.adapters import file
from trimtab.checkpoint.headers import read_header
from trimtab.cli import main
from trimtab.doctor.preflight.preflight import preflight
from trimtab.errors import AdapterError, DeviceError
from trimtab.verification.merges.retention_files import survival_of_files

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
FILE = "adapter_model.safetensors"


def spoiled(folder, value, dtype=None):
    """Return a copy of the demo's style adapter in which one tensor has two such values, and that tensor's name."""
    shutil.copytree(demo.ADAPTERS["style"], folder)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_file(folder / FILE).items()}
    name = sorted(tensors)[5]
    tensors[name].view(-1)[3:5] = value
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder, name


@pytest.fixture(scope="module")
def model():
    with trimtab.load(trimtab.plan(demo.BASE, device=DEVICE, context=128, images=0, audio_s=0.0)) as loaded:
        yield loaded


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_adapter_with_values_that_are_not_finite_is_refused_by_tensor(model, tmp_path, value, dtype):
    folder, name = spoiled(tmp_path / "bad", value, dtype)
    error = raised(AdapterError, model.load_adapter, "bad", folder)
    count = load_file(folder / FILE)[name].numel()
    assert error.problems == (f"{name}: 2 of {count} values are NaN or infinite",)
    assert error.path == str(folder) and model.adapters == ()


def test_run_refuses_it_too_before_it_answers(tmp_path, capsys):
    folder, name = spoiled(tmp_path / "bad", math.nan)
    arguments = ["run", str(demo.BASE), "hi", "--adapter", f"a={folder}", "--device", "cpu", "--context", "128"]
    assert main.main(arguments) == 5
    out, err = capsys.readouterr()
    assert out == "" and name in err


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.2}])
def test_logits_that_are_not_numbers_end_the_answer_with_an_error(model, options):
    norm = model.hf_model.model.language_model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(math.nan)
    try:
        with pytest.raises(DeviceError, match="logits are NaN or infinite") as caught:
            model.answer("Hello", max_new_tokens=4, **options)
    finally:
        with torch.no_grad():
            norm.copy_(kept)
    assert caught.value.hint == "Check the model's weights"
    assert model.answer("Hello", max_new_tokens=2, **options).token_ids


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_values_of_every_type_are_finite(dtype, tmp_path, monkeypatch):
    """The bits that are read say what torch says, at the ends of the pieces as well."""
    monkeypatch.setattr(file, "_PIECE_BYTES", 512)
    values = torch.linspace(-8, 8, 999).to(dtype)
    if dtype.is_floating_point:
        values = torch.cat([values.float(), torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])]).to(dtype)
    for value in (None, math.nan, math.inf) if dtype.is_floating_point else (None,):
        spoiled = values.clone()
        if value is not None and not (dtype is torch.float8_e4m3fn and value == math.inf):  # it has no infinity
            for place in (0, 255, 256, 998):
                spoiled[place] = value
        save_file({"empty": torch.empty(0, dtype=dtype), "a": spoiled}, tmp_path / "x.safetensors")
        problems = file.value_problems(read_header(tmp_path / "x.safetensors").tensors)
        expected = int((~spoiled.double().isfinite()).sum())
        assert problems == ((f"a: {expected} of {len(spoiled)} values are NaN or infinite",) if expected else ())


ENTRIES = {
    "plan": ["plan", "BASE", "--adapter", "a=BAD", "--device", "cpu"],
    "run": ["run", "BASE", "hi", "--adapter", "a=BAD", "--device", "cpu"],
    "chat": ["chat", "BASE", "--adapter", "a=BAD", "--device", "cpu"], "doctor": ["doctor", "BASE", "--adapter", "BAD"],
    "merge": ["merge", "BASE", "OUT", "--adapter", "a=BAD"],
    "verify": ["verify", "BASE", "--adapter", "a=BAD", "--against", "base"],
    "bench": ["bench", "BASE", "--adapter", "a=BAD", "--device", "cpu"],
    "serve": ["serve", "BASE", "--adapter", "a=BAD", "--device", "cpu", "--port", "0"], "inspect": ["inspect", "BAD"],
    "inspect with a model": ["inspect", "BAD", "--model", "BASE"],
}  # fmt: skip


@pytest.mark.parametrize("command", ENTRIES)
def test_every_command_names_the_tensor_and_has_the_adapters_exit_code(command, tmp_path, capsys, monkeypatch):
    folder, name = spoiled(tmp_path / "bad", math.nan)
    words = {"BASE": str(demo.BASE), "OUT": str(tmp_path / "out")}
    arguments = [words.get(word, word.replace("BAD", str(folder))) for word in ENTRIES[command]]
    loaded = []
    monkeypatch.setattr(trimtab, "load", lambda *args, **options: loaded.append(args))
    code = main.main(arguments)
    out, err = capsys.readouterr()
    assert code == 5 and not loaded
    assert name in out + err and str(folder) in out + err
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_folder_lists_the_tensor(tmp_path, capsys):
    _, name = spoiled(tmp_path / "bad", math.inf)
    assert main.main(["adapters", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be used" in out and f"bad: {name}: 2 of" in out


def test_every_python_entry_names_the_tensor(tmp_path):
    folder, name = spoiled(tmp_path / "bad", math.nan)
    entries = {
        "plan": lambda: trimtab.plan(demo.BASE, adapters={"a": folder}, device="cpu"),
        "load": lambda: trimtab.load(demo.BASE, adapters={"a": folder}, device="cpu"),
        "merge": lambda: trimtab.merge(demo.BASE, tmp_path / "out", adapters={"a": folder}),
        "verify": lambda: trimtab.verify(demo.BASE, adapters={"a": folder}, against="base", isolated=False),
        "preflight": lambda: preflight(demo.BASE, adapter=folder),
        "survival": lambda: survival_of_files(demo.BASE, demo.BASE, folder),
    }
    for entry, call in entries.items():
        error = raised(AdapterError, call)
        assert any(problem.startswith(f"{name}: 2 of") for problem in error.problems), entry
        assert error.path == str(folder), entry
    assert trimtab.inspect(folder)["not_finite"][0].startswith(f"{name}: 2 of")
    assert trimtab.inspect(demo.ADAPTERS["style"])["not_finite"] == []


def test_no_look_at_values_keeps_the_interpreter_from_other_threads_for_long(tmp_path, monkeypatch):
    save_file({"a": torch.ones(2**21)}, tmp_path / "a.safetensors")
    sizes = []

    class File(io.FileIO):
        def read(self, count=-1):
            data = super().read(count)
            sizes.append(len(data))
            return data

    monkeypatch.setattr(file, "open", File, raising=False)
    assert file.value_problems(read_header(tmp_path / "a.safetensors").tensors) == ()
    assert sum(sizes) == 2**23 and max(sizes) <= 2**18
