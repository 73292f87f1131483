"""No control character of a file or a name reaches a terminal, a log or a report."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from pathlib import Path

import pytest

from tests import pico, talking
from tests.adapter_files import write_adapter
from tests.rules import each
from trimtab.cli.main import main
from trimtab.errors import AdapterError, CheckpointError, RequestError
from trimtab.printable import printable
from trimtab.report.document import Document, Table, Text
from trimtab.report.render import FORMS, Lines
from trimtab.serve.contract.log import TextLines

# Title, clear screen, bell, delete, C1's CSI, an override of the direction and an isolate.
EVIL = "e\x1b]0;owned\x07\x1b[2J\r\x08\x7f\x9b31m\u202edcba\u2066v"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@each("char", [chr(code) for code in range(0xA0)] + list("\u202a\u202e\u2066\u2069\u200f\u061c\u2028"))
def test_each_control_character_becomes_visible(char):
    made = printable(f"a{char}b")
    assert not RAW.search(made)
    assert made == f"a{char}b" if char.isprintable() or char in "\t\n" else made.startswith("a\\") and made.endswith("b")
    assert printable(f"a{char}b", one_line=True).isprintable()


def test_text_of_every_script_stays():
    text = "Łódź 東京 مرحبا שלום 👩‍💻 é"
    assert printable(text) == text


@pytest.mark.parametrize("error", [
    RequestError("no", field=EVIL, value=EVIL, allowed=(EVIL,), hint=EVIL), CheckpointError(EVIL, path=EVIL, tensor_name=EVIL),
    AdapterError(EVIL, [EVIL], hint=EVIL),
], ids=["request", "checkpoint", "adapter"])  # fmt: skip
def test_messages_of_errors(error):
    assert not RAW.search(str(error)) and "\\x1b]0;owned" in str(error)
    assert error.hint in ("", EVIL)  # fields keep the values


def test_a_cell_of_a_table_is_one_line():
    assert Lines().show(Document("", [Table(("a\nb", EVIL), [("c", "d")])])).startswith("a\\nb  e\\x1b]0;owned")


def test_a_traceback_in_the_log_and_a_page():
    try:
        raise ValueError(EVIL)
    except ValueError as exc:
        record = logging.LogRecord("x", logging.ERROR, "", 0, f"failed: {EVIL}", (), (type(exc), exc, exc.__traceback__))
    assert not RAW.search(TextLines().format(record))
    for form in FORMS.values():
        assert not RAW.search(form.show(Document(EVIL, [Text(EVIL), Table((EVIL, EVIL), [(EVIL, EVIL)])])))


def _changed(folder: Path, name: str, **values: object) -> Path:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


def _adapter(folder: Path, name: str = "model.layers.0.self_attn.q_proj", **config: object) -> Path:
    head = f"base_model.model.{name}"
    shapes = {f"{head}.lora_A.weight": (4, 8), f"{head}.lora_B.weight": (8, 4)}
    return write_adapter(folder, shapes, **{"target_modules": ["q_proj"], **config})


ADAPTERS = {
    "tensor": {"name": f"model.{EVIL}.q_proj"}, "targets": {"target_modules": [EVIL, "q_proj"]},
    "pattern": {"target_modules": EVIL},
    "base": {"base_model_name_or_path": EVIL}, "version": {"peft_version": EVIL}, "type": {"peft_type": EVIL},
    "task": {"task_type": EVIL},
    "bias": {"bias": EVIL}, "rank": {"r": EVIL}, "alpha": {"lora_alpha": EVIL}, "unknown field": {EVIL: EVIL},
    "rank pattern": {"rank_pattern": {EVIL: 4}}, "saved": {"modules_to_save": [EVIL]}, "dropout": {"lora_dropout": EVIL},
    "init": {"init_lora_weights": EVIL}, "layers": {"layers_pattern": EVIL, "layers_to_transform": [EVIL]},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return talking.build_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(llama, tmp_path, capfd, name):
    adapter = str(_adapter(tmp_path / "adapter", **ADAPTERS[name]))
    for command in (
        ["inspect", adapter], ["inspect", adapter, "--model", str(llama)], ["adapters", str(tmp_path)],
        ["plan", str(llama), "--adapter", f"a={adapter}", "--context", "32", "--device", "cpu"],
        ["merge", str(llama), str(tmp_path / "out"), "--adapter", adapter],
    ):  # fmt: skip
        main(command)
        said = capfd.readouterr()
        assert said.out + said.err and not RAW.search(said.out + said.err), command


CONFIGS = {
    "type": {"model_type": EVIL}, "architecture": {"architectures": [EVIL]}, "dtype": {"dtype": EVIL},
    "torch dtype": {"torch_dtype": EVIL},
    "weights": {"transformers_weights": EVIL}, "activation": {"hidden_act": EVIL},
    "method": {"quantization_config": {"quant_method": EVIL}},
    "rope": {"rope_scaling": {"rope_type": EVIL, "factor": 2.0}}, "layers": {"num_hidden_layers": EVIL},
    "code": {"auto_map": {EVIL: EVIL}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path, capfd, name):
    folder = _changed(pico.build("llama", tmp_path / "base"), "config.json", **CONFIGS[name])
    capfd.readouterr()  # what building wrote
    for command in (["plan", str(folder), "--context", "32", "--device", "cpu"], ["models", str(tmp_path)]):
        main(command)
        said = capfd.readouterr()
        assert not RAW.search(said.out + said.err), command


def _index(folder: Path) -> Path:
    _changed(folder, "config.json")
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EVIL: f"{EVIL}.safetensors"}}))
    return folder


def _header(folder: Path) -> Path:
    text = json.dumps({EVIL: {"dtype": EVIL, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    return folder


@pytest.mark.parametrize("spoil", [_index, _header])
def test_weight_files(tmp_path, capfd, spoil):
    folder = spoil(pico.build("llama", tmp_path / "base"))
    assert main(["plan", str(folder), "--context", "32", "--device", "cpu"]) == 3
    said = capfd.readouterr()
    assert "\\x1b" in said.err and not RAW.search(said.out + said.err)


def test_other_files_and_arguments(llama, tmp_path, capfd):
    evil_plan, prompts, registry = tmp_path / "plan.json", tmp_path / "prompts.jsonl", tmp_path / "registry.toml"
    evil_plan.write_text(json.dumps({"version": EVIL, EVIL: EVIL}))
    prompts.write_text(json.dumps({"id": EVIL, EVIL: EVIL}) + "\n")
    quoted = json.dumps(EVIL).replace("\\u007f", "\\u007F").replace("\x7f", "\\u007f")
    registry.write_text(f"[models.{quoted}]\npath = {quoted}\n{quoted} = 1\n")
    model = str(llama)
    for command in (
        ["run", str(evil_plan), "hi"], ["run", model, "--prompts", str(prompts), "--out", str(tmp_path / "o")],
        ["serve", "--registry", str(registry), "--port", "0"], ["serve", "--config", str(registry)],
        ["run", model, "hi", "--use", EVIL], ["run", model, "hi", "--adapter", f"{EVIL}={EVIL}"], ["plan", EVIL], ["inspect", EVIL],
        ["plan", model, "--card", EVIL], ["plan", model, "--place", f"{EVIL}=cpu"], ["models", str(tmp_path / EVIL)], [EVIL],
        ["verify", model, "--against", EVIL], ["bench", EVIL], ["doctor", "--" + EVIL], ["pull", EVIL], ["merge", EVIL, EVIL],
    ):  # fmt: skip
        with contextlib.suppress(SystemExit):
            main(command)
        said = capfd.readouterr()
        assert not RAW.search(said.out + said.err), command


def test_a_template(tmp_path, capfd):
    folder = talking.build_llama(tmp_path / "llama", chat_template=f"{{{{ raise_exception({json.dumps(EVIL)}) }}}}")
    capfd.readouterr()
    assert main(["run", str(folder), "--context", "64", "--device", "cpu", "hello"]) == 2
    said = capfd.readouterr()
    assert "owned" in said.err and not RAW.search(said.out + said.err)


def test_json_keeps_the_values(tmp_path, capfd):
    adapter = str(_adapter(tmp_path / "adapter", base_model_name_or_path=EVIL))
    assert main(["inspect", adapter, "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["base_model"] == EVIL and not RAW.search(said.out)
