"""The plan in 80 columns says what the wide table says."""

import re
from dataclasses import replace

import pytest

import trimtab
from tests import long_runs, pico
from tests.planning.values.test_execution import card, plan
from trimtab.cli import main
from trimtab.demo import BASE
from trimtab.planning.plan.table import time_text
from trimtab.report.render import WIDTH, Lines


@pytest.mark.parametrize("gib", [3.2, 4, 8])
def test_no_line_is_wider_than_80_columns(gib):
    made = plan(gib, head="auto")
    text = Lines(WIDTH).show(made.document())
    assert max(map(len, text.splitlines())) <= WIDTH
    flat = re.sub(r"\s+", " ", text)
    assert f"budget of {gib:.2f} GiB" in flat and made.execution.step.reason in flat
    for name in {row.block_path for row in made.placements if not row.block_path.rpartition(".")[2].isdecimal()}:
        assert name.removeprefix("model.") in flat
    assert all(re.sub(r"\s+", " ", row.reason) in flat for row in made.placements)


@pytest.mark.parametrize("gib", [4, 8])
def test_every_width_has_every_line_of_the_execution(gib):
    made = replace(plan(gib, head="auto"), dtype_reason="bfloat16 is emulated here")
    execution = made.execution
    phases = {"prompt": execution.prompt, "towers": execution.towers, "decode step": execution.step}
    for flat in (" ".join(Lines(width).show(made.document()).split()) for width in (60, 80, 120, 200)):
        for name, phase in phases.items():
            assert f" {name} {phase.mode}" in flat and phase.reason in flat
        assert f"{time_text(execution.prompt.seconds)} for a full context" in flat
        assert "type bfloat16: bfloat16 is emulated here" in flat
        assert (execution.head == "int8") == (gib == 4) == ("8-bit head, " in flat)


def test_layers_that_leave_are_all_named():
    made = plan(3.2, machine=card(3.2))
    numbers: set[int] = set()
    flat = re.sub(r",\s+", ",", Lines(WIDTH).show(made.document()))
    for ranges in re.findall(r"language_model\.layers\.([\d,-]+)", flat):
        for part in ranges.strip(",").split(","):
            low, _, high = part.partition("-")
            numbers |= set(range(int(low), int(high or low) + 1))
    assert numbers == set(range(42))


def test_the_command_prints_the_narrow_form_and_the_wide_one_by_flag(capsys):
    asked = ["plan", str(BASE), "--device", "cpu", "--context", "256"]
    assert main.main(asked) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= WIDTH
    assert main.main([*asked, "--wide"]) == 0
    wide = capsys.readouterr().out
    assert max(map(len, wide.splitlines())) > WIDTH
    assert "on top" not in narrow + wide  # a CPU has no context, kernels or graphs


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_a_plan_of_every_family_fits_80_columns(family, tmp_path):
    folder = pico.build(family, tmp_path / family)
    adapter = pico.adapter(folder, tmp_path / "adapter", targets="all")
    made = trimtab.plan(
        folder, adapters={"an-adapter-with-quite-a-long-name-for-one-line": adapter}, card="T4", place={"*": "stream"}, context=64
    )
    # The model's path is the user's own: it is not cut.
    lines = [line for line in Lines(WIDTH).show(made.document()).splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= WIDTH
