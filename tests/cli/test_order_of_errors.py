"""With several things wrong every command names them in one order: arguments, then files, then the model, then the adapter."""

import pytest

import trimtab.demo as demo
from tests.raised import refused
from trimtab.cli import main
from trimtab.doctor.preflight.preflight import preflight
from trimtab.errors import AdapterError, CheckpointError

# Words of the command, and those of a file that it cannot read or write.
COMMANDS = {
    "plan": ([], ["--save", "no/such/x.json"]), "run": (["hi"], ["--image", "no.png"]),
    "verify": ([], ["--save", "no/such/x.json"]), "bench": ([], ["--picture", "no/such/x.svg"]),
    "doctor": ([], ["--html", "no/such/x.html"]),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_come_before_files_before_the_model_before_the_adapter(command, capsys):
    rest, file = COMMANDS[command]
    adapter = ["--adapter", "a=no/adapter"]
    steps = [
        (["no/model", *rest, *adapter, "--gpu-memory", "4", *file], 2, "--gpu-memory"),
        (["no/model", *rest, *adapter, "--gpu-memory", "4GiB", *file], 2, file[1].rpartition("/")[0] or file[1]),
        (["no/model", *rest, *adapter, "--gpu-memory", "4GiB"], 3, "no/model"),
        ([str(demo.BASE), *rest, *adapter, "--gpu-memory", "4GiB"], 3, "no/adapter"),
    ]
    for arguments, code, words in steps:
        assert (main.main([command, *arguments]), words in capsys.readouterr().err) == (code, True), arguments


def test_in_python_the_doctor_has_the_same_order():
    error = refused(preflight, "no/model", adapter="no/adapter", device_map={"a": 1.5}, gpu_memory="4")
    assert error.field == "gpu_memory"
    assert refused(preflight, "no/model", adapter="no/adapter", device_map={"a": 1.5}).field == "device_map"
    with pytest.raises(CheckpointError):
        preflight("no/model", adapter="no/adapter")
    with pytest.raises(AdapterError):
        preflight(demo.BASE, adapter="no/adapter")
