"""What two routes loaded, compared: other dtypes are the same, a scale off by 1 %, a dropped or a transposed module are named."""

import pytest
import torch

from trimtab.verification.routes.loaded_changes import SIZE, compare_changes, sketch


def pair(seed=0, rank=4, size=64, out=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, size, generator=generator), torch.randn(out, rank, generator=generator)


def loaded(scale=2.0, dtype=torch.float32, change=lambda A, B: (A, B), count=3):
    found = {}
    for number in range(count):
        A, B = pair(number)
        if number == 1:
            A, B = change(A, B)
        found[f"layers.{number}.q_proj"] = sketch(A.to(dtype), B.to(dtype), scale)
    return {"a": found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_adapter_in_any_dtype_is_the_same(dtype):
    found = compare_changes(loaded(), loaded(dtype=dtype))
    assert found is not None and (found.modules, found.wrong) == (3, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_scale_off_by_one_percent_is_named_in_every_module(dtype, factor):
    found = compare_changes(loaded(), loaded(2.0 * factor, dtype))
    assert len(found.wrong) == 3
    assert all(row.share == pytest.approx(factor, abs=0.002) and row.rest < 0.05 for row in found.wrong)
    assert f"{100 * found.wrong[0].share:.4g} % of the change of a is present" in str(found.wrong[0])


FAULTS = {"dropped": lambda A, B: (A, 0 * B), "transposed": lambda A, B: (B.T, A.T), "another": lambda A, B: pair(9)}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_module_is_named_and_no_other(fault):
    found = compare_changes(loaded(), loaded(change=FAULTS[fault]))
    assert [row.module_path for row in found.wrong] == ["layers.1.q_proj"]
    assert found.to_json()["wrong"][0]["adapter"] == "a"


def test_a_module_that_one_side_lacks_is_wrong_unless_names_differ_or_it_does_nothing():
    less = {"a": {path: row for path, row in loaded()["a"].items() if path != "layers.2.q_proj"}}
    assert [row.module_path for row in compare_changes(loaded(), less).wrong] == ["layers.2.q_proj"]
    assert compare_changes(loaded(), less, same_names=False).wrong == ()
    idle = {"a": less["a"] | {"layers.2.q_proj": [0.0] * SIZE}}
    assert compare_changes(less, idle).wrong == ()
    assert compare_changes({}, loaded()) is None


def test_signs_are_fixed_and_balanced():
    """The numbers may be made by two releases of torch: they come from integers alone."""
    row = sketch(torch.ones(1, 3), torch.ones(2, 1), 1.0)
    assert row[:6] == EXPECTED
    many = torch.tensor(sketch(torch.ones(1, 4096), torch.ones(4096, 1), 1.0 / 4096))
    assert float(many.square().mean()) == pytest.approx(1.0, abs=0.8)


EXPECTED = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
