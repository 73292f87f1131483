"""What the GPU's memory checker is given to follow: the same, run on the CPU, so that it is known to run."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tests.cuda_on_cpu import modules, run
from tests.gpu import once
from trimtab.engine.formats import int8_head as head8
from trimtab.engine.kernels import attention_and_norms as fused
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import embed_and_logits as ends
from trimtab.engine.kernels import gemm4 as many_rows
from trimtab.engine.kernels import gemv4 as matvec

pytestmark = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))


def test_every_kernel_runs_and_is_right(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[1:3])
    monkeypatch.setattr(once, "ATTENTION", once.ATTENTION[3:])
    monkeypatch.setattr(once, "PAGED", ((2, 1, 64),))
    parts = modules.products(), modules.small(), modules.step_ends()
    assert list(once.findings(*parts, rows=(1,), limit=2)) == []
    names = {name for part in parts for name in modules.launches(part)}
    wide = {f"rope_{way}_{v}" for way in fused.ROPES for v in (2, 4, 8)} | {"attend_combine"}  # of heads of 128 to 512: slow here
    assert {*fused.NAMES, *fused.ATTEND_NAMES, *ends.NAMES, *matvec.NAMES, "matvec_held"} - names == wide
    assert any("-DPAGE=64" in options for options in parts[1].attention)


def test_every_width_of_a_rotation_is_among_what_the_memory_checker_follows():
    assert {next(v for v in (1, 2, 4, 8) if v * 64 >= dim) for _, _, dim, *_ in once.ATTENTION} == {1, 2, 4, 8}


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[3:])
    monkeypatch.setattr(once.fused_check, "check", lambda *args, **kwargs: "attention is wrong")
    monkeypatch.setattr(once.fused_check, "check_pages", lambda *args, **kwargs: "pages are wrong")
    monkeypatch.setattr(once, "wrong_turns", lambda *args: "turns are wrong")
    said = list(once.findings(modules.products(), modules.small(), modules.step_ends(), rows=(1,), limit=1))
    assert said == ["attention is wrong", "pages are wrong", "turns are wrong"]


def test_the_parts_are_together_the_whole_and_nothing_twice(monkeypatch):
    """Only what would be run is looked at: which cut of which product, and who does the rest."""
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[:2])
    asked, rest = [], []
    monkeypatch.setattr(once.tuning, "check", lambda group, module, **how: asked.append((len(group), how["rows"], how["cut"])))
    monkeypatch.setattr(once.matvec, "matvec4", lambda x, group, out, **how: (asked.append((len(group), how["cut"])), out.zero_()))
    monkeypatch.setattr(once.fused_check, "check", lambda *args, **kwargs: rest.append("small"))
    monkeypatch.setattr(once.ends, "check", lambda *args, **kwargs: rest.append("ends"))
    monkeypatch.setattr(once.fused_check, "check_pages", lambda *args: rest.append("pages"))
    monkeypatch.setattr(once, "wrong_turns", lambda *args: rest.append("turns"))
    monkeypatch.setattr(once.routers, "check", lambda *args: rest.append("routers"))
    monkeypatch.setattr(once.kernels, "wrong_lora", lambda *args: rest.append("lora"))

    def run(**part):
        asked.clear(), rest.clear()
        assert list(once.findings(modules.products(), None, None, limit=3, **part)) == []
        return list(asked), list(rest)

    whole, everything = run()
    parts = [run(part=number, parts=4) for number in (1, 2, 3, 4)]
    assert sorted(map(str, whole)) == sorted(str(one) for found, _ in parts for one in found)
    assert [found for _, found in parts] == [[], [], [], everything] and everything == [
        "small", "pages", "turns", "routers", "ends", "ends", "lora", "lora",
    ]  # fmt: skip
    assert all(found for found, _ in parts)


def test_kernels_of_many_tokens_run_and_are_right(monkeypatch):
    monkeypatch.setattr(once, "MANY_PRODUCTS", once.MANY_PRODUCTS[1:2])
    monkeypatch.setattr(once, "UNPACKED", once.UNPACKED[:1])
    monkeypatch.setattr(once, "HEADS", ((64, 256),))
    parts = modules.prompts(), modules.rows(), modules.heads()
    found = list(once.findings_of_many(*parts, tokens=(1, 17), rows=(9,)))
    # bitsandbytes 0.49's own product on a CPU has other float16 values there: 17 of 30,720 are a rounding away.
    old = tuple(int(part) for part in version("bitsandbytes").split(".")[:2]) < (0, 50)
    assert [one for one in found if not (old and one.startswith("an unpacked weight") and "float16" in one)] == []
    names = {name for part in parts for name in modules.launches(part)}
    wanted = {*prompt_kernels.NAMES, *many_rows.NAMES, *head8.NAMES}
    assert wanted - names == {"rows_product_32", "rows_product_64"}  # MANY_ROWS has both, and they take long here
    roomy = SimpleNamespace(shared_bytes=227 * 1024)
    assert {many_rows._tile(n, roomy, 16) for n in once.MANY_ROWS} == {16, 32, 64}


def test_a_wrong_kernel_of_many_tokens_is_named(monkeypatch):
    monkeypatch.setattr(once, "HEADS", ())
    monkeypatch.setattr(once.prompt_kernels, "wrong_add", lambda *args, **kwargs: "one is")
    monkeypatch.setattr(once.prompt_kernels, "wrong_unpack", lambda *args, **kwargs: "one value is")
    monkeypatch.setattr(once.adapter_columns, "wrong", lambda *args, **kwargs: "columns are")
    monkeypatch.setattr(once.many_rows, "wrong", lambda *args, **kwargs: None)
    said = list(once.findings_of_many(modules.prompts(), modules.rows(), None, tokens=(1,), rows=(9,)))
    assert "adapters of a prompt, torch.bfloat16: one is" in said
    assert "an unpacked weight, fp4, torch.float16: one value is" in said
    assert "adapters inside products, nf4: columns are" in said
