"""Towers of families that nobody has looked at: an index beyond a table is refused by name before it is looked up."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import trimtab
from tests import pico, talking
from tests.engine.chat.test_media_check import HAS_TABLE, SEEING, SIZES, prepared
from tests.lent import lent
from trimtab.engine.chat import prompt
from trimtab.engine.chat.media_check import check_pictures
from trimtab.engine.towers import bounds_check
from trimtab.engine.towers.bounds_check import BeyondTableError, CheckedIndices, guard_towers, unknown_towers
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Job

pytestmark = pytest.mark.usefixtures("no_kept_anatomies")

TABLE = torch.arange(12.0).reshape(4, 3)
LOOK_UPS = {
    "embedding": lambda index: torch.nn.functional.embedding(index, TABLE),
    "one_hot as a GPU does it": lambda index: torch.zeros(len(index), 4).scatter_(1, index[:, None], 1.0),
    "index": lambda index: TABLE[index], "index of a second axis": lambda index: TABLE.T[:, index],
    "index_select": lambda index: TABLE.index_select(0, index), "gather": lambda index: TABLE.gather(0, index[:, None]),
    "scatter": lambda index: torch.zeros(4).scatter(0, index, 1.0),
    "index_put": lambda index: TABLE.clone().index_put((index,), torch.zeros(3)),
    "index_add": lambda index: TABLE.clone().index_add(0, index, torch.zeros(len(index), 3)),
    "index_copy": lambda index: TABLE.clone().index_copy(0, index, torch.zeros(len(index), 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_UPS)
def test_every_operation_that_looks_something_up_is_checked_before_it_runs(name):
    look_up = LOOK_UPS[name]
    with CheckedIndices():
        found = look_up(torch.tensor([0, 3, 1]))
        with pytest.raises(BeyondTableError, match="entry 4 of a table of"):
            look_up(torch.tensor([0, 4]))
    assert torch.equal(found, look_up(torch.tensor([0, 3, 1])))


def test_indices_from_the_end_are_no_error_where_python_counts_so():
    with CheckedIndices():
        assert torch.equal(TABLE[torch.tensor([-1])], TABLE[3:])
        for beyond in (lambda: TABLE[torch.tensor([-5])], lambda: TABLE.index_select(0, torch.tensor([-1]))):
            with pytest.raises(BeyondTableError, match="entry -"):
                beyond()
        assert TABLE[torch.tensor([], dtype=torch.long)].shape == (0, 3)


def test_a_mask_beside_indices_is_no_index():
    mask = torch.tensor([True, False, True, False])
    with CheckedIndices():
        assert TABLE[mask, torch.tensor([0, 2])].tolist() == [0.0, 8.0]
        with pytest.raises(BeyondTableError, match="entry 3 of a table of 3"):
            TABLE[mask, torch.tensor([0, 3])]


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_the_towers_of_these_tests_are_known(family):
    assert unknown_towers(pico.make_model(family).config) == ()


def test_a_load_leaves_known_towers_as_they_are():
    with lent("qwen3_vl") as model:
        assert not any("forward" in vars(part) for part in model.hf_model.model.children())


@pytest.mark.parametrize("family", SEEING)
def test_as_an_unknown_family_it_refuses_what_has_no_place_and_reads_the_rest(family, monkeypatch):
    model = pico.make_model(family)
    monkeypatch.setattr(bounds_check, "KNOWN", ())
    parts = guard_towers(model)
    assert parts and "language_model" not in parts
    monkeypatch.setattr(prompt, "check_pictures", lambda *arguments: None)
    refused = []
    for size in SIZES:
        picture = Image.new("RGB", size, "red")
        inputs = prepared(family, images=[picture])
        try:
            with torch.no_grad():
                assert torch.isfinite(model(**inputs.tensors).logits).all()
        except RequestError as error:
            assert error.field == "image" and "of a table of 64" in str(error)
            with pytest.raises(RequestError):  # the same as where the family is known
                check_pictures(model.config, inputs.tensors, [picture])
            refused.append(size)
    assert bool(refused) == (family in HAS_TABLE)


def test_shapes_that_do_not_go_together_are_refused_and_other_failures_are_not(monkeypatch):
    monkeypatch.setattr(bounds_check, "KNOWN", ())
    model = pico.make_model("qwen3_vl")
    raised: list[Exception] = []

    def fail(*args, **kwargs):
        raise raised[0]

    monkeypatch.setitem(vars(model.model.visual), "forward", fail)
    guard_towers(model)
    for exc in (RuntimeError("The size of tensor a (3) must match"), ValueError("wrong image size"), IndexError("beyond")):
        raised[:] = [exc]
        with pytest.raises(RequestError, match="does not fit this model"):
            model.model.visual()
    for exc in (torch.OutOfMemoryError("out of memory for this size"), RuntimeError("CUDA error: size"), RuntimeError("no")):
        raised[:] = [exc]
        with pytest.raises(type(exc)):
            model.model.visual()


def test_a_loaded_model_of_an_unknown_family_refuses_a_picture_and_answers_the_next(tmp_path, monkeypatch):
    folder = talking.build_gemma4(tmp_path / "gemma4")
    monkeypatch.setattr(bounds_check, "KNOWN", ())
    monkeypatch.setattr(prompt, "check_pictures", lambda *arguments: None)
    with trimtab.load(trimtab.plan(folder, quant="nf4", device="cpu", context=256, images=1)) as model:
        with pytest.raises(RequestError, match="has no place for it") as caught:
            model.answer("What is it?", image=Image.new("RGB", (1, 65)), max_new_tokens=2)
        assert model.answer("What is it?", image=Image.new("RGB", (64, 64)), max_new_tokens=2).token_ids
    # The server names the place of the one picture that there is.
    content = [{"type": "text", "text": "?"}, {"type": "image", "image": b""}]
    job = Job("a", [{"role": "user", "content": content}], GenerateRequest())
    assert for_client(caught.value, job).field == "messages[0].content[1].image_url"
