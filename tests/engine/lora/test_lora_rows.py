"""Adapters are added row by row as selected, come on the model all or nothing and leave it without a trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.lora.toy_lora import IDS, WIDTH, Toy, make_adapter, ours, put_on, read, spec_of
from tests.raised import raised, refused
from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.lora import layers
from trimtab.engine.lora.layers import SavedModule, attach_fitted, detach, fit
from trimtab.engine.lora.store import AdapterStore, Holders
from trimtab.errors import AdapterError

# Saved modules


def test_a_saved_module_keeps_path_parameters_and_attributes(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, modules_to_save=["norm"])
    model, store = ours(toy, torch.float32)
    original = model.norm
    names = [name for name, _ in model.named_parameters()]
    put_on(model, store, toy, folder, "one")
    assert isinstance(model.norm, SavedModule) and model.get_submodule("norm") is model.norm
    assert [name for name, _ in model.named_parameters()] == names and model.norm.eps == original.eps
    assert model.norm.weight is original.weight
    store.set("one")
    assert torch.equal(model.norm.weight, read(read_adapter(folder).tensors["base_model.model.norm.weight"]))
    with pytest.raises(AttributeError, match="no_such_attribute"):
        model.norm.no_such_attribute  # noqa: B018 - reading it is the test
    detach(model, "one")
    assert model.norm is original


# Names


def test_attached_adapters_are_in_one_registry() -> None:
    store = AdapterStore()
    for name in ("one", "two"):
        store.attached(name, Holders(None, []))
    assert store.serials == {"one": 1, "two": 2} and list(store.names) == ["one", "two"]
    store.detached("one")
    store.attached("one", Holders(None, []))
    assert store.serials == {"two": 2, "one": 3} and store.serial_of("one") == store.last_serial == 3
    store.holders.clear()  # as a model does that is closed
    assert not store.serials and not store.names and store.serial_of("one") is None


# Rows


def three_adapters(tmp_path: Path, kind: str = "nf4") -> tuple[Toy, Toy, AdapterStore]:
    toy = Toy(kind, torch.bfloat16)
    model, store = ours(toy, torch.bfloat16)
    put_on(model, store, toy, make_adapter(tmp_path / "a", toy, seed=1, target_modules=["embed", "up"]), "a")
    put_on(model, store, toy, make_adapter(tmp_path / "b", toy, seed=2, use_dora=True), "b")
    put_on(model, store, toy, make_adapter(tmp_path / "c", toy, seed=3, modules_to_save=["norm", "head"]), "c")
    return toy, model, store


@pytest.mark.parametrize("rows", [["a", None, "b"], ["c", "a", None], ["b", "a", "b"]])
def test_each_row_equals_the_same_row_with_its_adapter_alone(rows: list[str | None], tmp_path: Path) -> None:
    toy, model, store = three_adapters(tmp_path)
    alone = []
    with torch.no_grad():
        for name in rows:
            store.set(name)
            alone.append(model(IDS))
        store.set_rows(rows)
        mixed = model(IDS)
    for index, name in enumerate(rows):
        if name is None:
            assert torch.equal(mixed[index], toy(IDS)[index])
        # A batch of another size may take another CPU kernel: bfloat16 has 8 bits, four layers round in turn.
        torch.testing.assert_close(mixed[index], alone[index][index], rtol=2**-6, atol=2**-6)
    assert not torch.equal(mixed, toy(IDS))


def test_rows_without_an_adapter_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, store = three_adapters(tmp_path)
    seen: list[int] = []
    apply = layers.LinearAdapter.apply
    monkeypatch.setattr(layers.LinearAdapter, "apply", lambda self, leaf, x, y: seen.append(len(x)) or apply(self, leaf, x, y))
    store.set_rows([None, "b", None])
    with torch.no_grad():
        model(IDS)
    assert seen == [1, 1]
    seen.clear()
    store.set_rows([None, None, None])
    with torch.no_grad():
        model(IDS)
    assert seen == []


def test_equal_rows_are_one_adapter_and_work_for_any_batch(tmp_path: Path) -> None:
    _, model, store = three_adapters(tmp_path)
    store.set_rows(["a", "a"])
    assert store.selection.active() == ("a",) and store.selection.rows is None
    with torch.no_grad():
        together = model(IDS)
        store.set("a")
        assert torch.equal(together, model(IDS))


def test_mixed_rows_with_another_number_of_inputs_are_refused(tmp_path: Path) -> None:
    _, model, store = three_adapters(tmp_path)
    store.set_rows(["a", "b"])
    error = refused(model, IDS)
    assert error.field == "adapter" and error.value == ["a", "b"]


def test_a_tower_needs_its_own_rows_even_if_the_counts_agree(tmp_path: Path) -> None:
    toy, model, store = three_adapters(tmp_path)
    model.up.adapters["a"].part = model.up.adapters["b"].part = "vision"
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    store.set_rows(["a", "b"])
    assert "vision" in str(refused(model.up, x))
    store.set_rows(["a", "b"], towers={"vision": ["b", None]})
    with torch.no_grad():
        found = model.up(x)
        assert torch.equal(found[1], toy.up(x)[1])
        store.set("b")
        torch.testing.assert_close(found[0], model.up(x)[0], rtol=2**-7, atol=2**-7)


def test_a_layer_that_no_routed_adapter_changes_takes_any_shape(tmp_path: Path) -> None:
    toy, model, store = three_adapters(tmp_path)
    store.set_rows(["a", None])
    x = torch.randn(9, 2 * WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.down(x), toy.down(x))


@pytest.mark.parametrize(("call", "field"), [
    (lambda store: store.set("x"), "adapter"), (lambda store: store.set_rows(["a", "x"]), "adapter"),
    (lambda store: store.set_rows([]), "rows"), (lambda store: store.set_rows(["a", None], towers={"head": ["a"]}), "towers"),
    (lambda store: store.set_rows(["a", None], towers={"vision": ["x"]}), "adapter"),
])  # fmt: skip
def test_a_route_refuses_what_it_does_not_know(call: Callable[[AdapterStore], None], field: str, tmp_path: Path) -> None:
    _, _, store = three_adapters(tmp_path)
    store.set("b")
    assert refused(call, store).field == field and store.selection.active() == ("b",)


# Attaching and detaching


def test_attaching_a_name_twice_is_refused(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, store = ours(toy, torch.float32)
    folder = make_adapter(tmp_path, toy)
    put_on(model, store, toy, folder, "one")
    assert refused(put_on, model, store, toy, folder, "one").value == "one"


def test_detaching_an_unknown_name_lists_what_is_attached(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, store = ours(toy, torch.float32)
    put_on(model, store, toy, make_adapter(tmp_path, toy), "one")
    assert refused(detach, model, "two").allowed == ("one",)


def test_a_failing_read_attaches_nothing(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, store = ours(toy, torch.float32)
    calls = []

    def failing(entry: TensorEntry) -> Tensor:
        calls.append(entry)
        if len(calls) == 5:
            raise OSError("disk gone")
        return read(entry)

    spec = spec_of(make_adapter(tmp_path, toy, modules_to_save=["norm"]), toy)
    norm = model.norm
    with pytest.raises(OSError, match="disk gone"):
        attach_fitted(fit(model, spec), "one", read=failing, device="cpu", store=store)
    assert not model.up.adapters and not model.down.adapters and model.norm is norm
    assert not store.names


def test_a_model_without_the_modules_is_refused_with_all_of_them(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, store = ours(toy, torch.float32)
    spec = spec_of(make_adapter(tmp_path, toy, target_modules=["up", "down", "embed"], modules_to_save=["norm"]), toy)
    del model._modules["down"]
    model._modules["up"] = nn.Linear(WIDTH, 2 * WIDTH)
    model._modules["norm"] = nn.Identity()
    error = raised(AdapterError, lambda: attach_fitted(fit(model, spec), "one", read=read, device="cpu", store=store))
    words = "\n".join(error.problems)
    assert len(error.problems) == 4  # norm lacks two parameters
    assert "no module down" in words and "up is a Linear" in words and "norm has no weight" in words
    assert not model.embed.adapters
    assert not store.names


def test_detach_gives_the_memory_back_and_falls_back_to_the_base(tmp_path: Path) -> None:
    toy, model, store = three_adapters(tmp_path, "none")
    put_on(model, store, toy, make_adapter(tmp_path / "d", toy, modules_to_save=["norm", "head"]), "d")
    kept: list[Any] = [value for leaf in (model.up, model.head) for value in vars(leaf.adapters["d"]).values()]
    kept += model.norm.__dict__["adapters"]["d"].values()
    watched = [weakref.ref(value) for value in kept if isinstance(value, Tensor)]
    assert len(watched) == 5  # A and B of up, weight of head, weight and bias of norm
    del kept
    store.set("d")
    detach(model, "d")
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert store.selection.active() == (None,) and store.names == {"a", "b", "c"}
    with torch.no_grad():
        assert torch.equal(model(IDS), toy(IDS))
    detach(model, "c")
    assert not isinstance(model.norm, SavedModule)
