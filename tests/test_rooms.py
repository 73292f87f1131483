"""Rooms: each imports earlier ones only, has few files, and says what it answers; former names go on."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import trimtab
from tools import rooms
from trimtab import former_names

# Imports that lead to a later room. Most are types of a batch and its rows; none may be added.
UPWARD = """
doctor/cases/trimtab_run.py -> __init__.py
engine/kept_batch.py -> engine/model.py
engine/chat/turn_end.py -> engine/batch/sampling.py
engine/decode/batch_invariant.py -> engine/batch/batch.py
engine/decode/batch_invariant.py -> engine/batch/request.py
engine/decode/batch_invariant.py -> engine/prefill/prefill.py
engine/decode/decode_step.py -> engine/model.py
engine/decode/step_choice.py -> engine/model.py
engine/families/chunk.py -> engine/prefill/prefill.py
engine/families/last_layers.py -> engine/prefill/prefill.py
engine/kv/pages.py -> engine/batch/request.py
engine/prefill/layouts.py -> engine/prefill/prefill.py
engine/prefill/last_token.py -> engine/batch/request.py
engine/prefill/last_token.py -> engine/prefill/prefill.py
engine/prefill/packing.py -> engine/batch/request.py
engine/prefill/prefill.py -> engine/batch/batch.py
engine/prefill/prefill.py -> engine/batch/request.py
engine/prefill/prefix_cache.py -> engine/batch/batch.py
engine/prefill/prefix_cache.py -> engine/batch/request.py
engine/prefill/stock_pass.py -> engine/batch/batch.py
engine/prefill/stock_pass.py -> engine/batch/request.py
engine/prefill/warm_up.py -> engine/batch/batch.py
engine/towers/graphs.py -> engine/model.py
engine/prefill/tower_passes.py -> engine/batch/request.py
engine/prefill/tower_passes.py -> engine/prefill/prefill.py
planning/values/plan.py -> planning/display/chart.py
planning/values/plan.py -> planning/display/table.py
planning/values/plan.py -> planning/module_tree.py
serve/contract/client_words.py -> serve/api/request_kinds.py
verification/merges/variants.py -> verification/merges/variants_text.py
verification/render/html.py -> verification/render/report.py
verification/render/text.py -> verification/render/report.py
""".strip().splitlines()


def test_a_room_imports_earlier_rooms_only():
    found = rooms.upward()
    assert [one for one in found if one not in UPWARD] == [], "an import leads to a later room: see tools/rooms.py"
    assert [one for one in UPWARD if one not in found] == [], "better: take these lines out of the list"


def test_every_file_stands_in_a_room_of_the_order():
    found = rooms.files()
    assert set(found) == set(rooms.ORDER)
    counts = {room: sum(file.name != "__init__.py" for file in files) for room, files in found.items()}
    assert {room: count for room, count in counts.items() if count > rooms.MOST_FILES and room != rooms.CATALOGUE} == {}


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
    with pytest.warns(
        DeprecationWarning, match=r"trimtab\.plan\.kv_form is trimtab\.planning\.values\.kv_bytes now"
    ) as told:
        module = importlib.import_module("trimtab.plan.kv_form")
    assert module is importlib.import_module("trimtab.planning.values.kv_bytes") and len(told) == 1


def test_plan_and_merge_stay_functions_beside_their_former_folders():
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import trimtab, trimtab.plan.blocks, trimtab.merge.recipe, trimtab.runtime.hf_gemma4\n"
        "from trimtab.runtime import chat\n"
        "assert chat.__name__ == 'trimtab.engine.chat.prompt'\n"
        "try: trimtab.plan('/nowhere')\n"
        "except trimtab.CheckpointError: pass\n"
        "try: trimtab.merge('/nowhere', '/out', adapters={'a': '/none'})\n"
        "except trimtab.TrimtabError: print('both')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=rooms.ROOT)
    assert ran.stdout == "both\n", ran.stderr


def test_every_former_name_leads_to_a_file():
    for old, new in former_names.moves().items():
        assert (rooms.PACKAGE / f"{new}.py").is_file(), (old, new)


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trimtab.runtime.nothing")
    assert not hasattr(trimtab, "nothing")
