"""The tracer: replayed operations give what torch gives on real tensors, and what cannot be replayed is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trimtab.engine.loader.tracing import CannotFollowError, NoAllocation, Trace, Traced, is_undefined

FILES = {"a": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6), "b": torch.arange(24, 48, dtype=torch.bfloat16).reshape(4, 6)}


def traced(*names: str) -> tuple[Traced, ...]:
    trace = Trace(lambda a, b: torch.equal(a.replay(FILES.__getitem__), b.replay(FILES.__getitem__)))
    return tuple(trace.tensor(name, tuple(FILES[name].shape), FILES[name].dtype) for name in names)


OPERATIONS = {
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "cat of casts": lambda a, b: torch.cat([a.to(torch.float32), b.to(torch.float32)], dim=-1),
    "second chunk": lambda a, b: torch.chunk(torch.cat((a, b)), 4, dim=0)[2],
    "unbind": lambda a, b: a.unbind(0)[3], "transposed": lambda a, b: a.transpose(0, 1),
    "transposed and packed": lambda a, b: torch.stack([a, b]).transpose(1, 2).contiguous(),
    "view and permute": lambda a, b: a.view(2, 2, 6).permute(1, 0, 2).reshape(4, 6),
    "index": lambda a, b: a[1:3, ::2], "gather by a real index": lambda a, b: b[torch.tensor([3, 0])],
    "arithmetic": lambda a, b: (a - 1) * b / 2 + a.float().mean(dim=0), "maximum": lambda a, b: torch.max(a, dim=1).values,
    "keyword tensors": lambda a, b: torch.where(condition=a > 3, input=a, other=b),
    "sizes": lambda a, b: a.reshape(a.shape[1], a.size(0)) if a.dim() == 2 and a.numel() == 24 else b,
    "parameter": lambda a, b: nn.Parameter(a.T, requires_grad=False),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_replayed_operation_equals_the_real_one(name):
    operation = OPERATIONS[name]
    expected = operation(FILES["a"].clone(), FILES["b"].clone())
    made = operation(*traced("a", "b"))
    assert isinstance(made, Traced) and made.shape == expected.shape and made.dtype == expected.dtype
    found = made.expression.replay(FILES.__getitem__)
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype


def test_devices_detaching_and_whole_slices_leave_a_leaf():
    (a,) = traced("a")
    same = nn.Parameter(a[...].to(device="cpu", dtype=torch.bfloat16).detach(), requires_grad=False).cpu()
    assert same.expression.is_leaf and same.expression.leaves == ("a",)
    assert a.device == torch.device("cpu") and not a.is_meta


def test_questions_about_the_form_are_answered_without_recording_anything(monkeypatch):
    """They are most of what a loader asks of a model's tensors."""
    (a,) = traced("a")
    monkeypatch.setattr("trimtab.engine.loader.tracing._check_recordable", lambda *_: pytest.fail("recorded"))
    assert (a.shape, a.dtype, a.ndim, a.dim(), a.size(1), a.numel(), a.grad_fn) == ((4, 6), torch.bfloat16, 2, 2, 6, 24, None)
    assert a.is_floating_point() and type(a.shape) is torch.Size


def test_a_cast_is_not_a_leaf_and_each_leaf_is_asked_for_once():
    a, b = traced("a", "b")
    made = torch.stack([a.to(torch.float32), b.to(torch.float32), a.to(torch.float32)])
    asked = []

    def fetch(tensor_name: str) -> Tensor:
        asked.append(tensor_name)
        return FILES[tensor_name]

    assert not made.expression.is_leaf and made.expression.leaves == ("a", "b")
    made.expression.replay(fetch)
    assert asked == ["a", "b"]


def test_a_replay_does_not_change_the_file_tensor():
    (a,) = traced("a")
    before = FILES["a"].clone()
    (a * 2).expression.replay(FILES.__getitem__)
    assert torch.equal(FILES["a"], before)


def test_equality_is_answered_from_the_files():
    a, b = traced("a", "b")
    assert torch.equal(a, a.detach()) and not torch.equal(a, b)
    assert not torch.equal(a, a.to(torch.float32)) and not torch.equal(a, torch.zeros(4, 6))


def fill(a: Tensor) -> Tensor:
    return torch.empty(4, 6, dtype=a.dtype, device="meta").copy_(a)


REFUSED = {
    "in place": (lambda a: a.add_(1), "add_ on a: it writes in place"),
    "assigned slice": (lambda a: a.__setitem__(0, 1.0), "__setitem__ on a: it writes in place"),
    "out argument": (lambda a: torch.add(a, 1, out=torch.empty(4, 6)), "add on a: it writes in place"),
    "data replaced": (lambda a: setattr(a, "data", torch.zeros(4, 6)), "__set__ on a: it writes in place"),
    "fresh tensor filled": (fill, "copy_ on a: it writes in place"),
    "without data": (lambda a: a + torch.empty(4, 6, device="meta"), "add on a: another operand has no data"),
    "random": (lambda a: a + torch.rand_like(a), "add on a: another operand has no data"),
    "uninitialized": (lambda a: a.copy_(torch.empty_like(a).fill_(1)), "copy_ on a: it writes in place"),
    "dropped": (lambda a: nn.functional.dropout(a), "dropout on a: its result is not made from its inputs alone"),
    "data of another form": (lambda a: setattr(a, "data", nn.functional.pad(a, (0, 1))), "__set__ on a: it writes in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_and_named(name):
    operation, words = REFUSED[name]
    (a,) = traced("a")
    with pytest.raises(CannotFollowError):
        operation(a)
    assert len(a.run.problems) == 1 and words in a.run.problems[0]


def test_data_may_be_replaced_by_traced_values_of_the_same_form():
    a, b = traced("a", "b")
    a.data = nn.functional.pad(a.data, (0, 0))
    assert a.expression.leaf == "a"
    a.data = b.data * 2
    assert torch.equal(a.expression.replay(FILES.__getitem__), FILES["b"] * 2)
    assert torch.empty_like(a, device="cpu").uniform_(0, 1).log_().is_meta


@pytest.mark.parametrize("read", [lambda a: a.sum().item(), lambda a: bool((a > 0).all()), lambda a: a.tolist()])
def test_reading_a_value_is_refused(read):
    (a,) = traced("a")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        read(a)
    assert a.run.problems


def test_a_failing_operation_is_kept_with_its_file_tensors():
    a, b = traced("a", "b")
    with pytest.raises(RuntimeError):
        torch.cat([a, b[:, :3]])
    (problem,) = a.run.problems
    assert problem.startswith("cat on a, b: ") and "Sizes of tensors must match" in problem


def test_missing_parameters_stay_without_data_and_uncomputed_buffers_are_told():
    parameter = nn.Parameter(torch.empty(1000, 1000, device="meta"))
    floats, ints = torch.empty(3, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    with NoAllocation(2**20):
        assert torch.empty_like(parameter, device="cpu").is_meta
        made = [torch.empty_like(buffer, device="cpu") for buffer in (floats, ints)]
    assert all(is_undefined(buffer) for buffer in made)
    for buffer in made:
        buffer[0] = 1
    assert not any(is_undefined(buffer) for buffer in made)
    assert not torch.empty_like(parameter, device="cpu").is_meta, "the mode ends with the block"
    assert not is_undefined(torch.empty(0))
