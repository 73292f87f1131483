"""Rooms: each imports earlier ones only, has few files, and says what it answers; former names go on."""

import ast
import importlib
import re
import subprocess
import sys
import warnings

import pytest

import trimtab
from tools import rooms, ways
from trimtab import former_names


def test_a_room_imports_earlier_rooms_only():
    assert rooms.upward() == [], "an import leads to a later room: see tools/rooms.py"


def test_every_file_stands_in_a_room_of_the_order():
    found = rooms.files()
    assert set(found) == set(rooms.ORDER)
    counts = {room: sum(file.name != "__init__.py" for file in files) for room, files in found.items()}
    assert {room: count for room, count in counts.items() if count > rooms.MOST_FILES} == {}


def test_every_room_asks_a_question():
    openings = {room: rooms.sentence(files[0].with_name("__init__.py")) for room, files in rooms.files().items() if "." not in room
                and files[0].parent != rooms.PACKAGE}  # fmt: skip
    assert {room: text for room, text in openings.items() if not text.endswith("?")} == {}


def test_an_import_for_the_type_checker_counts(tmp_path, monkeypatch):
    package = tmp_path / "trimtab"
    for room, text in (
        ("checkpoint", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trimtab.engine import model\n"),
        ("engine", "from trimtab.checkpoint import a\n"),
    ):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
        (package / room / ("a.py" if room == "checkpoint" else "model.py")).write_text(text)
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    monkeypatch.setattr(rooms, "PACKAGE", package)
    assert rooms.upward() == ["checkpoint/a.py -> engine/model.py"]


def test_a_former_name_is_the_module_itself_and_warns():
    with pytest.warns(DeprecationWarning, match=r"trimtab\.plan\.kv_form is trimtab\.planning\.values\.byte_sizes now") as told:
        module = importlib.import_module("trimtab.plan.kv_form")
    assert module is importlib.import_module("trimtab.planning.values.byte_sizes") and len(told) == 1


def test_members_that_moved_after_their_module_are_found_by_its_former_name():
    wanted = {("trimtab.plan.plan", name) for name in ("FilesRead", "Handover", "Stamps", "Tree", "anatomy_key", "PLAN_VERSION")}
    wanted |= {(former.replace("plan.plan", "plan.module_tree"), name) for former, name in wanted}
    wanted |= {("trimtab.runtime.routers", "RouterAdapter"), ("trimtab.runtime.open_prompts", "are_possible")}
    wanted.add(("trimtab.runtime.kept_checks", "KeptChecks"))
    assert wanted <= set(former_names.members())  # each is imported by the next test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns once a process
        assert callable(importlib.import_module("trimtab.runtime.generate").generate)


def test_every_former_module_is_imported_and_its_renamed_members_lead_to_what_they_are_now():
    code = (
        "import importlib, warnings\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    from trimtab.plan import Plan, make_plan\n"  # a former folder has the names of its package, and warns
        "import trimtab.planning\n"
        "assert Plan is trimtab.planning.Plan and make_plan is trimtab.planning.make_plan\n"
        "assert len([one for one in told if issubclass(one.category, DeprecationWarning)]) >= 2\n"
        "warnings.simplefilter('ignore')\n"
        "import trimtab.plan.blocks\n"
        "from trimtab.runtime import turns\n"
        "assert turns.__name__ == 'trimtab.engine.batch.kept_batch'\n"
        "try: trimtab.plan('/nowhere')\n"  # a function beside its former folder
        "except trimtab.CheckpointError: print('called')\n"
        "from trimtab import former_names\n"
        "for old, new in former_names.modules().items():\n"
        "    assert importlib.import_module(old).__name__ in (old, new)\n"
        "for (old, name), (new, present) in former_names.members().items():\n"
        "    with warnings.catch_warnings(record=True) as told:\n"
        "        warnings.simplefilter('always')\n"
        "        found = getattr(importlib.import_module(old), name)\n"
        "    assert found is getattr(importlib.import_module(new), present), (old, name)\n"
        "    assert f'{old}.{name} is {new}.{present} now' in str(told[0].message)\n"
        "from trimtab.runtime.kernels import *\n"
        "print(Kernels.__name__, attention_and_norms.__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=rooms.ROOT)
    assert ran.stdout == "called\nDeviceKernels trimtab.engine.kernels.attention_and_norms\n", ran.stderr


@pytest.mark.parametrize("one", ways.TABLE, ids=lambda one: one.key)
def test_each_thing_is_done_in_the_ways_that_its_table_names(one):
    assert one.unnamed() == [], "a way more: use one of tools/ways.py, or name it there"
    assert one.lost() == [], "no such way any more"


def test_the_architecture_names_each_way():
    assert ways.in_words() in (rooms.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), "run: python tools/ways.py"


def test_a_way_that_no_table_names_is_found(monkeypatch):
    by_hand = {
        "doctor/new.py:text": "f'### {title}'", "engine/new.py:other": "hf_model(**x)",
        "serve/new.py:load": "Llama.from_pretrained(x)", "engine/new.py:kernel": "why = reason_of(exc, device)",
    }  # fmt: skip
    monkeypatch.setattr(ways, "definitions", lambda: tuple(by_hand.items()))
    found = [one.unnamed() for one in ways.TABLE if one.key in ("prompt_ways", "renderers", "stock_loaders", "choosers")]
    assert found == [["engine/new.py:other"], ["doctor/new.py:text"], ["serve/new.py:load"], ["engine/new.py:kernel"]]
    assert len(ways.TABLE[0].lost()) > 4


def test_events_are_recorded_on_the_stream_of_a_named_gpu():
    """Without a stream torch takes the current GPU's, which is another one where a model is on cuda:1."""
    files = [file for room in ("engine", "serve") for file in (rooms.PACKAGE / room).rglob("*.py")]
    assert not [str(file) for file in files if re.search(r"\.record\(\)", file.read_text(encoding="utf-8"))]


def test_one_file_of_the_tests_sleeps():
    """The others wait for a condition with `tests/waiting.py`: a pause is too long, or too short on a busy machine."""
    tests = rooms.ROOT / "tests"
    found = {file.relative_to(tests).as_posix() for file in tests.rglob("*.py") if re.search(r"\bsleep\(", file.read_text("utf-8"))}
    assert found == {"waiting.py"}


def test_no_docstring_names_a_file_by_its_former_name():
    present = {file.name for folder in ("trimtab", "tests", "tools", "bench") for file in (rooms.ROOT / folder).rglob("*.py")}
    former = {f"{old.rpartition('/')[2]}.py" for old in former_names.moves()} - present
    names = re.compile(rf"(?<![\w/])({'|'.join(sorted(map(re.escape, former)))})(?!\w)")
    files = [file for file in rooms.PACKAGE.rglob("*.py") if file.name != "former_names.py"]
    found = {file.name: hits for file in files if (hits := sorted(set(names.findall(file.read_text(encoding="utf-8")))))}
    assert found == {}


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trimtab.runtime.nothing")
    assert not hasattr(trimtab, "nothing")


# Formats of weights ---------------------------------------------------------------------------------------------------

# What a format is called, and what its parts are called in files or in memory; not words that other things have too.
FORMAT_NAMES = re.compile(
    r"(nf4|fp4)(-dq)?|(int[48]|fp8|mobile[248]|mxfp4|nvfp4)-[a-z0-9-]+|q[4568]_[01k]|mobile[248]|awq|gptq|gguf_?q\w*|codebook|ggml|"
    r"\.?(absmax|nested_\w+|quant_map|quant_state\S*|SCB|qweight|qzeros|g_idx|weight_scale\w*|weight_packed|weight_zero_point)"
)
# Parts in memory, beside the weight itself, and where they are looked up.
PART = r'"(scale|zero|outer|global|activation|index|offset|absmax|nested_absmax|SCB|code|nested_code)"'
PARTS_NAMED = re.compile(rf"\.(parts|codes|read_parts)(\[|\.get\(){PART}|{PART} (not )?in [\w.()]*\.(parts|codes)\b")
FORMAT_MODULES = re.compile(
    r"trimtab\.(engine\.)?formats\.(bitsandbytes\w*|compressed_tensors|float[48]|ggml|grouped|mobile|transposed)"
)
FORMAT_ROOMS = ("engine/formats/", "formats/", "gguf/")
# Other places that name formats or read their parts -> why.
NAME_FORMATS = {
    "bridge/": "inspects bitsandbytes' own modules in a stock model",
    "doctor/": "names the formats whose bugs in other packages it knows",
    "process/json_file.py": "limits each kind of JSON by its name",
    "request.py": "what a user may ask for is checked before a file is read",
    "stock/": "reads published layouts a second time, from other sources, for verify",
    "verification/merges/stock_merge.py": "merges over bitsandbytes' own layers, as the stock stack does",
}


def format_names(text):
    """Yield what a source knows of formats: their names, constant names of parts, modules of families, and a record's family."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (found[0] for found in PARTS_NAMED.finditer(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from [node.value] if FORMAT_NAMES.fullmatch(node.value) else []
        elif isinstance(node, ast.Attribute) and node.attr == "family":
            yield ".family"
        elif isinstance(node, ast.ImportFrom):
            yield from filter(FORMAT_MODULES.match, (f"{node.module}.{one.name}" for one in node.names))


def test_nothing_outside_the_rooms_of_formats_knows_one():
    found = {}
    for file in sorted(rooms.PACKAGE.rglob("*.py")):
        name = file.relative_to(rooms.PACKAGE).as_posix()
        if not name.startswith(FORMAT_ROOMS) and (names := sorted(set(format_names(file.read_text(encoding="utf-8"))))):
            found[name] = names
    unnamed = {name: names for name, names in found.items() if not name.startswith(tuple(NAME_FORMATS))}
    assert unnamed == {}, "ask the record (formats/record.py) or engine/formats/weights.py"
    assert not [place for place in NAME_FORMATS if not any(name.startswith(place) for name in found)], "no exception needed"


def test_no_kernel_asks_for_a_format():
    """Only headers compare FORMAT: sources ask what packed.cuh says of a layout."""
    folder = rooms.PACKAGE / "engine" / "kernels" / "cuda"
    asked = re.compile(r"#(el)?if[^/\n]*\bFORMAT\b|\bFORMAT *[!=<>?]")
    asking = {file.name for file in folder.iterdir() if asked.search(file.read_text(encoding="utf-8"))}
    assert "nf4.cuh" in asking and all(name.endswith(".cuh") for name in asking)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ('if quant == "nf4-dq": pass', ["nf4-dq"]), ('scale = packed.parts["scale"]', ['.parts["scale"']),
        ('packed.codes.get("code")', ['.codes.get("code"']), ('"absmax" in packed.parts', ['"absmax" in packed.parts', "absmax"]),
        ('form.family == "ggml"', [".family", "ggml"]), ('"""nf4: prose"""', []), ('x["scale"]; packed.parts["weight"]', []),
        ("from trimtab.engine.formats import mobile, weights", ["trimtab.engine.formats.mobile"]),
    ],
)  # fmt: skip
def test_the_names_of_formats_are_found_in_a_source(text, wanted):
    assert sorted(format_names(text)) == wanted


def renamed_modules(text: str) -> list[str]:
    """Return the modules and rooms that a file imports under another name although it has no other use for their own."""
    tree = ast.parse(text)
    imports = [
        (f"{node.module}.{one.name}", one) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names
    ]
    imports += [(one.name, one) for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    used = {one.asname or one.name for _, one in imports} | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = [
        name for name, one in imports if one.asname not in (None, name.rpartition(".")[2]) and name.rpartition(".")[2] not in used
    ]
    paths = {name: rooms.ROOT / name.replace(".", "/") for name in found}
    return [name for name, path in paths.items() if path.is_dir() or path.with_suffix(".py").is_file()]


def test_a_module_is_imported_under_its_own_name_so_that_a_search_finds_its_uses():
    files = sorted(file for folder in ("trimtab", "bench", "tools") for file in (rooms.ROOT / folder).rglob("*.py"))
    assert {file.name: found for file in files if (found := renamed_modules(file.read_text(encoding="utf-8")))} == {}
    for text in ("from trimtab.engine.kv import kv_cache as slots", "import trimtab.engine.kv.kv_cache as slots"):
        assert renamed_modules(f"{text}\nslots.x()") == ["trimtab.engine.kv.kv_cache"]
        assert renamed_modules(f"{text}\ndef run(kv_cache): ...") == []
    assert renamed_modules("from trimtab.engine import kv as states") == ["trimtab.engine.kv"]
    assert renamed_modules("from trimtab.engine.kv import kv_cache\nfrom os import path as place") == []
