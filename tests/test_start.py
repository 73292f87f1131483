"""What a start imports: no command in a worker, no HTTP library before the workers run, nothing replaced in other packages."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.cli import main
from trimtab.demo.demo import FOLDER
from trimtab.errors import RequestError
from trimtab.process import before_torch

# What the command has imported when its first worker starts.
COMMAND = """
import sys
from trimtab.serve import slots

def begin(self):
    print([one for one in ("uvicorn", "starlette.applications", "sse_starlette", "trimtab.serve.http.app") if one in sys.modules])
    raise SystemExit(0)

slots.Slots.begin = begin
sys.argv = ["trimtab", "serve", *sys.argv[1:]]
from trimtab.__main__ import main
main()
"""
# What a worker's interpreter imports of the script that started the command.
SCRIPT = "import sys; from trimtab.__main__ import main; print([name for name in sys.modules if name.startswith('trimtab.c')])"
# What other packages are after trimtab's own imports of them, and whether inductor came along.
OTHERS = """
import json, os, sys
finders = list(sys.meta_path)
import torch
is_distributed = torch.distributed.is_available
import trimtab.engine.loader.transformers_model, trimtab.engine.formats.bitsandbytes, transformers
own = [type(one).__module__ for one in sys.meta_path if one not in finders]
print(json.dumps({
    "changed": [name for name, value in vars(torch).items() if str(getattr(value, "__module__", "")).startswith("trimtab")],
    "distributed": torch.distributed.is_available is is_distributed,
    "answers": transformers.utils.is_torch_distributed_available() == is_distributed(),
    "ours": [name for name in own if name.startswith("trimtab") and name != "trimtab.former_names"],
    "stubs": [name for name, module in sys.modules.items() if module is None],
    "inductor": "torch._inductor.compile_fx" in sys.modules,
    "switch": os.environ.get("TORCHDYNAMO_DISABLE"),
}))
"""


def run(*arguments):
    made = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_other_packages_are_as_they_were_after_trimtab_imports_them():
    found = json.loads(run("-c", OTHERS).splitlines()[-1])
    assert found == {
        "changed": [], "distributed": True, "answers": True, "ours": [], "stubs": [], "inductor": False, "switch": None,
    }  # fmt: skip


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_looked_for_as_often_as_before_once_a_model_is_loaded(thresholds):
    before = gc.get_threshold()
    with before_torch.collecting_rarely():
        assert gc.get_threshold()[0] > before[0]
        before_torch.collect_again()
        assert gc.get_threshold() == before
    with pytest.raises(RequestError), before_torch.collecting_rarely():
        raise RequestError("no such model", field="model")
    assert gc.get_threshold() == before
    gc.set_threshold(1234, 5, 6)  # a program's own
    before_torch.collect_again()
    assert gc.get_threshold()[:2] == (1234, 5)


def test_imports_are_left_out_of_garbage_collections_only_while_a_command_imports(thresholds):
    gc.unfreeze()
    try:
        before_torch.keep_imports()
        assert gc.get_freeze_count() == 0
        with before_torch.collecting_rarely():
            before_torch.keep_imports()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


# How often garbage is looked for while a command plans, and once it is done.
OFTEN = """
import atexit, gc, sys
from trimtab import api
before = gc.get_threshold()
atexit.register(lambda: print("as before:", gc.get_threshold() == before, file=sys.stderr))
read = api.read_checkpoint
def read_checkpoint(*given):
    print("rarely:", gc.get_threshold() != before, file=sys.stderr)
    return read(*given)
api.read_checkpoint = read_checkpoint
sys.argv = ["trimtab", *sys.argv[1:]]
from trimtab.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("command, is_done", [(["plan"], True), (["run", "--host-memory", "1KiB"], False)])
def test_garbage_is_looked_for_as_often_as_before_after_a_command_that_loads_nothing(command, is_done):
    arguments = [*command, "--device", "cpu", str(FOLDER / "base"), *(["hello"] if "run" in command else [])]
    made = subprocess.run([sys.executable, "-c", OFTEN, *arguments], capture_output=True, text=True, timeout=300)
    lines = made.stderr.splitlines()
    assert (made.returncode == 0) == is_done and "rarely: True" in lines, made.stderr
    assert [line for line in lines if line.startswith("as before:")] == ["as before: True"]


def test_workers_start_before_what_answers_over_http_is_imported():
    assert run("-c", COMMAND, str(FOLDER / "base")).strip() == "[]"


def test_a_worker_imports_no_command():
    found = run("-c", SCRIPT)
    assert "trimtab.cli.main" not in found and "trimtab.cli" not in found
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'trimtab = "trimtab.__main__:main"' in project


# What the interpreter looks through for garbage as it ends, once a command is done.
ENDED = """
import atexit, gc, sys
atexit.register(lambda: print("left:", len(gc.get_objects())))
sys.argv = ["trimtab", "models", "--json"]
from trimtab.__main__ import main
main()
"""


def test_a_command_that_is_done_looks_for_no_garbage_among_its_modules():
    assert int(run("-c", ENDED).rpartition("left:")[2]) < 1000


# trimtab's own modules once a command line has been read.
READ = """
import sys
from trimtab.cli import main as cli
cli.parser(sys.argv[1:2]).parse_args(sys.argv[1:])
print([name for name in sys.modules if name.startswith("trimtab.")])
"""


def test_a_command_imports_no_other_command():
    found = run("-c", READ, "plan", "m")
    assert "trimtab.cli.commands.plan_run" in found
    assert not any(
        f"trimtab.{name}'" in found
        for name in ("cli.commands.serve", "cli.commands.doctor", "cli.chat.chat", "serve.worker.registry")
    )


@pytest.mark.parametrize("file", main.FILES)
def test_a_command_alone_is_read_as_among_all(file):
    (every,) = (action for action in main.parser()._actions if action.dest == "name")
    assert [*every.choices] == [name for names in main.FILES.values() for name in names]
    for name in main.FILES[file]:
        (own,) = (action for action in main.parser([name])._actions if action.dest == "name")
        assert own.choices[name].format_help() == every.choices[name].format_help()
