"""A start imports no compiler, no distributed tensors and no accelerate; what asks for the compiler later gets it whole."""

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.demo.line import FOLDER
from trimtab.machine import late_imports
from trimtab.machine.installed import TorchBuild
from trimtab.runtime.graph_cache import GraphCache

UNUSED = (
    "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx",
    "torch.distributed.checkpoint", "accelerate", "sympy.core", "scipy.optimize._optimize",
)  # fmt: skip
# A worker in this process, until it is ready; then one answer.
SERVED = """
import json, signal, sys
from trimtab.request import LoadRequest
from trimtab.serve import worker

class Pipe:
    sent = []
    def __init__(self): self.messages = []
    def poll(self, seconds): return True
    def receive(self): raise EOFError
    def send(self, message): self.sent.append(message); message["say"] == "ready" and print(json.dumps(sorted(sys.modules)))

worker.Channel = lambda connection: Pipe()
request = LoadRequest(model=sys.argv[1], device="cpu", context_tokens=256, images=0, audio_s=0.0)
worker.main(None, {"request": request.to_json(), "adapters": {}, "rows": 1, "queue_limit": 4})
print(json.dumps(Pipe.sent[-1]), file=sys.stderr)
"""
COMPILER = """
import sys
from trimtab.machine import late_imports
late_imports.use("cpu")
import trimtab.runtime.hf, torch, transformers
import transformers.masking_utils
assert "torch._dynamo.convert_frame" not in sys.modules

@torch.compiler.disable
def plain(x):
    return x + 1

@torch.compiler.allow_in_graph
def allowed(x):
    return 3 * x

@torch._dynamo.assume_constant_result
def constant():
    return 2

assert plain(1) == 2 and "torch._dynamo.convert_frame" not in sys.modules
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=backend)
def work(x):
    return allowed(plain(x + constant())) * 2

assert float(work(torch.ones(()))) == 24
assert "torch._dynamo.convert_frame" in sys.modules
assert len(graphs) == 2, len(graphs)   # apart at `plain`, which is not compiled
assert any(node.target is allowed for graph in graphs for node in graph.graph.nodes)
import torch._dynamo.utils, importlib
assert importlib.import_module("torch._dynamo") is torch._dynamo and torch._dynamo.config.cache_size_limit
assert torch.distributed.is_available() == hasattr(torch._C, "_c10d_init")
import accelerate
"""
BY_FILE = """
import sys
from trimtab.machine import late_imports
late_imports.use("cpu")
import trimtab.runtime.hf
assert "torch._dynamo.convert_frame" not in sys.modules
import torch._dynamo.variables.builder
assert torch._dynamo.optimize
"""
PROGRAM = """
import sys
import trimtab.api, trimtab.runtime.hf, transformers
assert transformers.utils.is_accelerate_available() and transformers.utils.is_torch_distributed_available()
assert not any("late_imports" in type(finder).__module__ for finder in sys.meta_path)
"""

# What the command has imported when its first worker starts.
COMMAND = """
import sys
from trimtab.serve import pool

def begin(self):
    print([name for name in ("uvicorn", "starlette.applications", "sse_starlette", "trimtab.serve.app") if name in sys.modules])
    raise SystemExit(0)

pool.Pool.begin = begin
sys.argv = ["trimtab", "serve", *sys.argv[1:]]
from trimtab.__main__ import main
main()
"""
# What a worker's interpreter imports of the script that started the command.
SCRIPT = "import sys; from trimtab.__main__ import main; print([name for name in sys.modules if name.startswith('trimtab.c')])"


def run(*arguments):
    made = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    return made.stdout


# Up to transformers 5.10 its own modules import sympy, and it has no function of this name.
OLD = tuple(int(part) for part in version("transformers").split(".")[:2]) < (5, 11)


def test_a_ready_worker_has_not_imported_what_answers_never_use():
    modules = json.loads(run("-c", SERVED, str(FOLDER / "base")).splitlines()[-1])
    assert "transformers.models.gemma4.modeling_gemma4" in modules
    assert [name for name in UNUSED if name in modules and not (OLD and name == "sympy.core")] == []


@pytest.mark.slow
def test_the_compiler_is_whole_when_it_is_asked_for():
    pytest.importorskip("accelerate")
    run("-c", COMPILER)


@pytest.mark.slow
def test_a_file_of_the_compiler_is_imported_after_its_package():
    run("-c", BY_FILE)


def test_a_program_that_imports_trimtab_keeps_its_own_imports():
    pytest.importorskip("accelerate")
    run("-c", PROGRAM.replace(" and transformers.utils.is_torch_distributed_available()", "") if OLD else PROGRAM)


CUDA, CPU, ROCM = (
    TorchBuild("2.13.0", cuda, has_hip=has_hip) for cuda, has_hip in (((12, 8), False), (None, False), (None, True))
)


@pytest.mark.parametrize(
    ("device", "build", "wanted", "is_on"),
    [
        ("auto", CUDA, None, True), ("cuda:1", CUDA, None, True), ("auto", CPU, None, True), ("auto", ROCM, None, False),
        ("cpu", ROCM, None, True), ("auto", None, None, False), ("auto", None, "1", True), ("cpu", CPU, "0", False),
        ("cuda", CUDA, "0", False),
    ],
)  # fmt: skip
def test_a_process_that_may_compute_with_rocm_imports_everything_first(device, build, wanted, is_on, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(late_imports, "_is_on", False)
    monkeypatch.setattr(late_imports, "torch_build", lambda: build)
    if wanted is None:
        monkeypatch.delenv(late_imports.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(late_imports.VARIABLE, wanted)
    late_imports.use(device)
    assert late_imports.is_on() == is_on


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler in the place of torch's, not run yet, and a torchvision that asks it one thing; the files that have run."""
    files = {
        "compiler/__init__.py": "ran = ['compiler']", "compiler/utils.py": "def is_compile_supported(kind): return kind == 'cuda'",
        "torchvision/__init__.py": "", "torchvision/ops/__init__.py": "",
        "torchvision/ops/roi_align.py": "from torch._dynamo.utils import is_compile_supported",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # The interpreter looks into this very dict, not into what `sys.modules` names.
    before = dict(sys.modules)
    for name in [name for name in before if name.startswith(("torch._dynamo", "torchvision"))]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [late_imports._Finder(), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location(
        "torch._dynamo", tmp_path / "compiler/__init__.py", submodule_search_locations=[str(tmp_path / "compiler")]
    )
    sys.modules["torch._dynamo"] = module = late_imports.LateModule(spec, lambda module: {})
    yield module
    for name in [name for name in sys.modules if name.startswith(("torch._dynamo", "torchvision"))]:
        del sys.modules[name]
    sys.modules.update(before)


def test_torchvision_brings_no_compiler_and_asks_it_when_it_is_used(compiler):
    asks = importlib.import_module("torchvision.ops.roi_align")
    assert "ran" not in compiler.__dict__ and "torch._dynamo.utils" not in sys.modules
    assert asks.is_compile_supported("cuda") is True and asks.is_compile_supported("cpu") is False
    assert compiler.__dict__["ran"] == ["compiler"]


def test_a_torchvision_that_imports_more_of_the_compiler_gets_all_of_it(compiler, tmp_path):
    with (tmp_path / "compiler/utils.py").open("a") as file:
        file.write("\nmore = 7")
    (tmp_path / "torchvision/ops/roi_align.py").write_text("from torch._dynamo.utils import more")
    assert importlib.import_module("torchvision.ops.roi_align").more == 7
    assert compiler.__dict__["ran"] == ["compiler"]


PLAIN = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(-2, 2), st.lists(st.integers(-2, 2), max_size=3))
SHAPE_NAMES = sorted(late_imports.shape_stand_ins(None))


@pytest.fixture
def shapes(tmp_path):
    """Symbolic shapes that are not imported: every name of the file says what it was given."""
    lines = [f"def {name}(*given, **named): return ('real', given, named)" for name in SHAPE_NAMES]
    (tmp_path / "shapes.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("shapes", tmp_path / "shapes.py")
    return late_imports.LateModule(spec, late_imports.shape_stand_ins)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(SHAPE_NAMES),
    given=st.lists(PLAIN.map(lambda one: tuple(one) if isinstance(one, list) else one), max_size=3),
)
def test_symbolic_shapes_answer_as_torch_for_numbers_and_truths(shapes, name, given):
    from torch.fx.experimental import symbolic_shapes

    real = getattr(symbolic_shapes, name, None)
    if real is None:
        return  # a name of another release
    answer = shapes.__dict__[name](*given) if not shapes.__dict__["_late"].is_loaded else ("real", (), {})
    if isinstance(answer, tuple) and answer[:1] == ("real",):
        assert answer[1:] == ((tuple(given), {}) if answer[1] else ((), {}))
    else:
        expected = real(*given)
        assert answer == expected and type(answer) is type(expected)


def test_symbolic_shapes_are_asked_for_anything_else(shapes):
    symbol = object()
    assert shapes.guard_or_false(True) is True and not shapes.__dict__["_late"].is_loaded
    ask = shapes.expect_true
    assert ask(symbol, skip=1) == ("real", (symbol,), {"skip": 1})
    assert shapes.__dict__["_late"].is_loaded and shapes.sym_eq(1, 2) == ("real", (1, 2), {})


def test_a_class_that_nothing_can_be_an_instance_of_yet_is_the_real_one_when_it_is_used(tmp_path):
    (tmp_path / "algebra.py").write_text("class Basic:\n    kind = 7\nclass Symbol(Basic): pass")
    spec = importlib.util.spec_from_file_location("algebra", tmp_path / "algebra.py")
    module = late_imports.LateModule(spec, late_imports.sympy_stand_ins)
    asked = module.Basic
    assert not isinstance(3, (str, asked)) and not module.__dict__["_late"].is_loaded

    class Own(asked):
        pass

    assert Own.__mro__[1] is module.Basic and module.__dict__["_late"].is_loaded
    assert isinstance(module.Symbol(), asked) and not isinstance(3, asked) and asked.kind == 7


def test_a_module_that_is_found_late_runs_at_its_first_use(tmp_path, monkeypatch):
    package = tmp_path / "scipy" / "optimize"
    package.mkdir(parents=True)
    (tmp_path / "scipy/__init__.py").write_text("")
    (package / "__init__.py").write_text("ran = True\ndef linear_sum_assignment(costs): return ['assigned', costs]")
    (package / "inner.py").write_text("import scipy.optimize\nassert scipy.optimize.ran\nvalue = 5")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "scipy"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [late_imports._Finder(), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    try:
        from scipy.optimize import linear_sum_assignment

        module = sys.modules["scipy.optimize"]
        assert isinstance(module, late_imports.LateModule) and "ran" not in module.__dict__
        assert linear_sum_assignment(3) == ["assigned", 3] and module.__dict__["ran"]
        assert importlib.import_module("scipy.optimize.inner").value == 5
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.mark.parametrize("wanted", ["check", None])
def test_a_module_that_is_first_needed_in_a_capture_is_named_if_that_is_checked(compiler, wanted, monkeypatch):
    if wanted is None:
        monkeypatch.delenv(late_imports.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(late_imports.VARIABLE, wanted)

    class Graph:
        capture_begin = capture_end = lambda self, **options: None

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
    monkeypatch.setattr("torch.cuda.stream", lambda side: nullcontext())
    for use in (lambda: compiler.ran, lambda: importlib.import_module("torchvision.ops")):
        if wanted is None:
            GraphCache().record(None, use)
        else:
            with pytest.raises(late_imports.LateImportError, match=r"torch\._dynamo|torchvision"):
                GraphCache().record(None, use)
    assert compiler.ran == ["compiler"]  # after a capture it is there


def test_workers_start_before_what_answers_over_http_is_imported():
    assert run("-c", COMMAND, str(FOLDER / "base")).strip() == "[]"


def test_a_worker_imports_no_command():
    found = run("-c", SCRIPT)
    assert "trimtab.cli" not in found and "trimtab.commands" not in found
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'trimtab = "trimtab.__main__:main"' in project
