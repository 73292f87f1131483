"""What the GPU's memory checker is given to follow: the same, run on the CPU, so that it is known to run."""

import pytest

from tests.cuda_on_cpu import modules, run
from tests.gpu import once

pytestmark = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))


def test_every_kernel_runs_and_is_right(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[1:3])
    monkeypatch.setattr(once, "ATTENTION", once.ATTENTION[2:])
    parts = modules.products(), modules.small(), modules.step_ends()
    assert list(once.findings(*parts, rows=(1,), limit=2)) == []
    assert {"matvec_held", "attend", "rows", "add_norm"} <= {name for part in parts for name in modules.launches(part)}


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[3:])
    monkeypatch.setattr(once.fused_check, "check", lambda *args, **kwargs: "attention is wrong")
    said = list(once.findings(modules.products(), modules.small(), modules.step_ends(), rows=(1,), limit=1))
    assert said == ["attention is wrong"]


def test_the_parts_are_together_the_whole_and_nothing_twice(monkeypatch):
    """Only what would be run is looked at: which cut of which product, and who does the rest."""
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[:2])
    asked, rest = [], []
    monkeypatch.setattr(
        once.tuning, "check", lambda group, module, **how: asked.append((len(group), how["rows"], how["cut"]))
    )
    monkeypatch.setattr(
        once.matvec, "matvec4", lambda x, group, out, **how: (asked.append((len(group), how["cut"])), out.zero_())
    )
    monkeypatch.setattr(once.fused_check, "check", lambda *args, **kwargs: rest.append("small"))
    monkeypatch.setattr(once.ends, "check", lambda *args, **kwargs: rest.append("ends"))

    def run(**part):
        asked.clear(), rest.clear()
        assert list(once.findings(modules.products(), None, None, limit=3, **part)) == []
        return list(asked), list(rest)

    whole, everything = run()
    parts = [run(part=number, parts=4) for number in (1, 2, 3, 4)]
    assert sorted(map(str, whole)) == sorted(str(one) for found, _ in parts for one in found)
    assert [found for _, found in parts] == [[], [], [], everything] and everything == ["small", "ends"]
    assert all(found for found, _ in parts)


def test_kernels_of_many_tokens_run_and_are_right(monkeypatch):
    monkeypatch.setattr(once, "MANY_PRODUCTS", once.MANY_PRODUCTS[1:2])
    monkeypatch.setattr(once, "UNPACKED", once.UNPACKED[:1])
    monkeypatch.setattr(once, "HEADS", ((64, 256),))
    parts = modules.prompts(), modules.rows(), modules.heads()
    assert list(once.findings_of_many(*parts, tokens=(1, 17), rows=(9,))) == []
    names = {name for part in parts for name in modules.launches(part)}
    assert {"unpack_nested", "unpack_plain", "lora_low", "lora_low_tensor", "lora_up", "lora_up_rows"} <= names
    assert {"rows_product_16", "rows_low", "rows_up", "head8"} <= names
    assert {"extend_input", "unpack_columns_nested", "unpack_columns_plain"} <= names


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
