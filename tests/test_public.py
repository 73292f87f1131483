"""What is promised in public: names, imports without circles, the map of rooms, and every example in the docs."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import trimtab
from tests.rules import each
from tools import readme_numbers, rooms
from tools.house import circles
from trimtab import errors
from trimtab.cli import main
from trimtab.cli.commands import merge_verify
from trimtab.cli.flags import flags
from trimtab.cli.main import ELSEWHERE
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process import exit_codes, interrupts
from trimtab.verification.server.report import EXIT_CANNOT_TELL

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trimtab"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PURE = [
    file for file in SOURCES
    if file.relative_to(PACKAGE).parts[0] in ("checkpoint", "gguf", "adapters", "planning", "report", "request.py", "errors.py")
    and file.name != "companion.py"
]  # fmt: skip
NO_TORCH = [file for file in SOURCES if file.parent.name == "machine"]
PSUTIL = (
    "trimtab/machine/memory.py", "trimtab/process/runner.py", "trimtab/machine/environment.py",
    "trimtab/machine/environment_child.py",
)  # fmt: skip
# What asks transformers for classes and functions; everything else gets its objects.
TRANSFORMERS = tuple(
    f"trimtab/{name}.py" for name in (
        "engine/batch/request", "engine/batch/generate", "engine/families/chunk", "engine/kv/int8",
        "engine/kv/kv_cache", "engine/kv/recurrent", "engine/loader/processor", "engine/loader/transformers_model",
        "engine/passes/attention", "engine/passes/chunk_forward", "engine/templates/budget", "gguf/companion",
    )
)  # fmt: skip
HEAVY = {
    "torch", "transformers", "bitsandbytes", "numpy", "accelerate", "peft", "safetensors", "psutil", "http.client",
    "urllib.request",
}  # fmt: skip


def name_of(file):
    return str(file.relative_to(ROOT).as_posix())


# Names and imports ----------------------------------------------------------------------------------------------------


def test_the_public_names_are_exactly_these():
    assert set(trimtab.__all__) == {
        "AdapterError", "Answer", "AnswerOptions", "CheckpointError", "Conversation", "DeviceError", "DoesNotFitError",
        "GenerateRequest", "LoadRequest", "LoadedModel", "MergeReport", "ParityError", "ParityReport", "Plan", "RequestError",
        "TokenLogprob", "TrimtabError", "Turn", "UpstreamError", "__version__", "bridge", "inspect", "load", "merge", "plan",
        "verify",
    }  # fmt: skip
    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    assert dir(trimtab) == sorted(trimtab.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'trimtab' has no attribute 'pland'"):
        _ = trimtab.pland


def test_importing_trimtab_imports_nothing_heavy_and_plan_stays_a_function():
    code = (
        "import sys, trimtab, trimtab.planning.plan.chart, trimtab.checkpoint, trimtab.merging.changes.request\n"
        "from trimtab.planning.plan.plan import Plan\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(trimtab.plan) and trimtab.plan.__module__ == 'trimtab.api'\n"
        "assert callable(trimtab.merge) and trimtab.merge.__module__ == 'trimtab.merging.merge'\n"
        "assert trimtab.Plan is Plan\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_error_is_public():
    tree = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TrimtabError)}
    assert {kind.__name__ for kind in tree} <= set(trimtab.__all__)


@cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(file):
    """Return the top-level packages that a file imports anywhere and the first line of each, those for types alone left out."""
    tree = tree_of(file)
    unused = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = {}
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in names:
            found.setdefault(name.partition(".")[0], f"line {node.lineno}")
    return found


def others(file, allowed):
    return {name: line for name, line in imports_of(file).items() if name not in allowed}


@each("file", SOURCES)
def test_each_foreign_library_is_imported_where_it_belongs(file):
    name = name_of(file)
    # What builds or examines the stock stack itself.
    is_stock = name.startswith(("trimtab/doctor/", "trimtab/bridge", "trimtab/stock/")) or (
        (name.startswith(("trimtab/verification/", "trimtab/benchmark/")) and "stock_" in file.name) or file.name == "run_stock.py"
    )
    allowed = {
        "transformers": is_stock or name in TRANSFORMERS,
        "bitsandbytes": is_stock or name == "trimtab/engine/formats/bitsandbytes.py",
        "psutil": name in PSUTIL,
        "peft": is_stock, "accelerate": is_stock,
    }  # fmt: skip
    misplaced = {name for name, is_allowed in allowed.items() if not is_allowed}
    assert {name: line for name, line in imports_of(file).items() if name in misplaced} == {}


@each("file", PURE)
def test_pure_files_import_the_standard_library_and_each_other(file):
    own = {"trimtab/checkpoint/hub.py": {"huggingface_hub"}, "trimtab/report/render.py": {"jinja2"}}.get(name_of(file), set())
    assert others(file, set(sys.stdlib_module_names) | {"trimtab"} | own) == {}


def test_what_the_runtime_keeps_things_by_has_a_type():
    """`dict[Any, ...]` hides what a key is. bounds_check.py keeps torch's own operators, whose class is not public."""
    files = [file for file in SOURCES if "engine" in file.parts and file.name != "bounds_check.py"]
    assert [file.name for file in files if re.search(r"\bdict\[Any,", file.read_text(encoding="utf-8"))] == []


@each("file", NO_TORCH)
def test_files_that_a_plan_needs_beside_the_pure_ones_import_no_torch(file):
    assert others(file, set(sys.stdlib_module_names) | {"trimtab", "psutil", "platformdirs"}) == {}
    assert "trimtab.engine" not in file.read_text(encoding="utf-8")


LIBRARY = [
    file for file in SOURCES
    if file.relative_to(PACKAGE).parts[0] in (
        "checkpoint", "adapters", "planning", "engine", "verification", "merging", "bridge",
        "api.py", "request.py", "errors.py", "adapter_names.py",
    )
]  # fmt: skip


@each("file", LIBRARY)
def test_errors_of_the_library_name_arguments_and_the_command_line_makes_flags_of_them(file):
    flags, tree = flags_of_the_parser(), tree_of(file)
    docstrings = {
        node.body[0].value for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }  # fmt: skip
    texts = [
        (f"line {node.lineno}", node.value) for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]  # fmt: skip
    assert [found for found in texts if set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", found[1])) & flags] == []


@each("file", SOURCES)
def test_a_file_opens_with_what_it_answers(file):
    if file.read_text(encoding="utf-8").strip():
        assert len(ast.get_docstring(tree_of(file)) or "") > 10


# Docs -----------------------------------------------------------------------------------------------------------------


FROM_PEFT = ROOT / "docs" / "from-peft.md"  # its blocks load stock PEFT as well, which takes seconds


def python_blocks():
    for file in (page for page in DOCS if page != FROM_PEFT):
        for place, block in enumerate(re.findall(r"^( *)```python\n(.*?)```", file.read_text("utf-8"), re.DOTALL | re.M)):
            indent, code = block
            yield pytest.param(re.sub(rf"^{indent}", "", code, flags=re.M), id=f"{name_of(file)}-{place}")


PYTHON_BLOCKS = list(python_blocks())


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_in_the_docs_runs(code, capsys):
    stand_ins = {
        "google/gemma-4-E4B-it": DEMO / "base", "adapters/medical": DEMO / "adapters" / "style",
        "xray.png": DEMO / "images" / "image_1.png",
    }  # fmt: skip
    for name, path in stand_ins.items():
        code = code.replace(f'"{name}"', repr(str(path)))
    # The docs' examples are for a GPU; here they run on what there is, with short answers.
    code = code.replace("max_new_tokens=64", "max_new_tokens=4").replace("max_new_tokens=16", "max_new_tokens=4")
    exec(compile(code, "example", "exec"), {})


@pytest.mark.slow
def test_the_page_from_peft_prints_the_same_text_twice(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)```", FROM_PEFT.read_text("utf-8"), re.DOTALL | re.M):
        exec(compile(block, "example", "exec"), names)
    assert names["from_peft"] == names["from_trimtab"] and len(names["from_peft"]) > 4


def commands():
    for file in DOCS:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
            if line.startswith((" ", "\t")) and line.strip().startswith("trimtab "):
                yield f"{name_of(file)}:{number}", line.strip()


COMMANDS = list(commands())


@each("place, command", COMMANDS, where=lambda item: item[0])
def test_commands_in_the_docs_can_be_parsed(place, command):
    options = main.parser().parse_args(shlex.split(command)[1:])
    if options.name in ("plan", "run") and getattr(options, "device_map", None) is None:
        flags.load_request(options)


def test_examples_are_found_in_the_docs():
    assert len(PYTHON_BLOCKS) >= 2
    assert {shlex.split(command)[1] for _, command in COMMANDS} == {
        "adapters", "bench", "chat", "completion", "demo", "doctor", "inspect", "merge", "models", "plan", "pull", "run", "serve",
        "tune", "verify",
    }  # fmt: skip


@cache
def flags_of_the_parser():
    commands = next(action for action in main.parser()._actions if action.dest == "name").choices.values()
    return {flag for command in commands for action in command._actions for flag in action.option_strings}


def test_flags_in_the_docs_and_in_error_messages_exist():
    texts = {name_of(file): file.read_text("utf-8") for file in [*DOCS, *SOURCES]}
    # Colours of a page are named like flags.
    texts = {name: re.sub(r"var\(--[a-z]+\)|--[a-z]+:", "", text) for name, text in texts.items()}
    flags = flags_of_the_parser()
    # Flags of other programs: pip, venv, pytest, the CUDA compiler, and our scripts in tools and bench.
    others = {
        "--no-deps", "--no-build-isolation", "--check", "--version", "--dest", "--disable-pip-version-check",
        "--find-links", "--index-url", "--torch-backend", "--no-input", "--only-binary", "--quiet", "--without-pip", "--scales",
        "--std", "--gpu-architecture", "--build-arg", "--profile", "--size", "--engines", "--continuous-batching", "--first-tokens",
        "--only", "--outside",
        # Of servers that are asked whether their adapter is alive.
        "--return-tokens-as-token-ids", "--lora-init-without-apply", "--lora-target-modules", "--enable-lora", "--lora-modules",
        "--max-lora-rank", "--lora-paths", "--lora", "--modelfile",
        "--max-loras", "--cpu-offload-gb", "--enable-tower-connector-lora",
        # Of docker and uv.
        "--rm", "--gpus", "--network", "--ulimit", "--create-home", "--uid", "--from", "--no-cache", "--no-cache-dir",
        "--constraint", *ELSEWHERE,
    }  # fmt: skip
    unknown = {
        (name, flag)
        for name, text in texts.items()
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)
        if flag not in flags | others
    }
    assert unknown == set()


@cache
def slugs_of(page):
    """Return what a link may name in a page: its headings as GitHub writes them in addresses."""
    headings = [line.lstrip("# ").lower() for line in page.read_text("utf-8").splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


@each("file", DOCS)
def test_links_lead_to_files_and_headings_that_exist(file):
    text = file.read_text("utf-8")
    broken = []
    for link in re.finditer(r"\]\(([^)#\s]*)(#[^)]*)?\)", text):
        path, heading = link.groups()
        if path.startswith("http"):
            continue
        found = (file.parent / path).resolve() if path else file
        if not found.exists() or (heading and heading[1:] not in slugs_of(found)):
            broken.append(f"{path}{heading or ''} in line {text.count(chr(10), 0, link.start()) + 1}")
    assert broken == []


def test_the_exit_codes_in_the_docs_are_the_tables():
    text = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    rows = {int(code): words for code, words in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)}
    plain = {code: re.sub(r" \(`[^)]*\)", "", words) for code, words in rows.items()}
    assert [code for code, words in exit_codes.EXIT_TEXTS.items() if not plain[code].startswith(words)] == []
    told = set(rows)
    assert told == {
        0, merge_verify.DIFFERS, EXIT_CANNOT_TELL, *(code for _, code in exit_codes.EXIT_CODES), main.STOPPED, main.READER_GONE,
        exit_codes.UNFINISHED, *interrupts.ENDING.values(),
    }  # fmt: skip


@each("page", readme_numbers.PAGES)
def test_the_numbers_in_the_docs_are_the_measured_ones(page):
    text = page.read_text("utf-8")
    assert "<!-- numbers:" in text
    assert readme_numbers.filled(text) == text


def test_the_changelog_has_this_version_in_80_lines_and_former_names_end_with_0_3():
    release = (ROOT / "CHANGELOG.md").read_text("utf-8").partition(f"\n## [{trimtab.__version__}] - 20")[2].partition("\n## [")[0]
    assert 0 < len(release.splitlines()) <= 80
    assert tuple(map(int, trimtab.__version__.split(".")[:2])) < (0, 3) or not (ROOT / "trimtab" / "former_names.py").exists()


def test_numbers_are_compared_with_stock_of_the_same_adapter():
    stock = {"model": "m", "engine": "stock", "placement": "resident", "adapter_rank": 8, "logits": "a", "media_logits": "b"}
    row = {**stock, "engine": "trimtab", "gpu_peak_gib": 1.239}
    results = {"rows": [stock, row, {**row, "media_logits": "x"}, {**row, "adapter_rank": 64}, {**row, "error": "why"}]}
    results |= {"context": 1, "environment": {"gpu": "G", "python": "3"}}
    lines = [line for line in readme_numbers.memory(results).splitlines() if line.startswith("| M |")]
    assert [line.split(" | ")[-1].rstrip(" |") for line in lines] == [
        "-", "yes", "text yes, media no", "not compared", "failed: why"
    ]  # fmt: skip
    assert "| 1.24 |" in lines[1]


def circles_of(package: Path) -> list[set[str]]:
    """Return the stems of the files of each circle of a package."""
    return [{file.stem for file in circle} for circle in circles(rooms.graph(package, types=False)) if len(circle) > 1]


def test_no_modules_import_each_other_in_a_circle():
    assert circles_of(rooms.PACKAGE) == []


def test_an_import_inside_a_function_is_part_of_a_circle_and_one_for_type_checkers_is_not(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from p.b import f\n")
    (package / "b.py").write_text("def f():\n    import p.a\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.d\n")
    (package / "d.py").write_text("from p import c\n")
    assert circles_of(package) == [{"a", "b"}]
