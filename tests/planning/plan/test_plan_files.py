"""A saved plan that was changed is refused by its field, or is exactly the plan that the file now says; it always prints."""

import copy
import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning.values.test_execution import plan
from tests.raised import raised, refused
from tests.rules import each
from trimtab.errors import CheckpointError, RequestError
from trimtab.planning import Plan
from trimtab.planning.plan.contents import PLAN_VERSION
from trimtab.planning.values.cards import find_card


def _whole():
    values = plan(8, adapters={"a": "folder"}, place={"audio": "host"}).to_json()
    values["placements"] = values["placements"][:3]  # enough of each kind, and a smaller space to search
    values["unquantized"] = values["unquantized"][:1]
    values["card"] = asdict(find_card("RTX 4060 8GB"))
    values["checkpoint_stamps"] = [["model.safetensors", 5, 6]]
    values["adapter_stamps"] = {"a": [["adapter_config.json", 1, 2]]}
    return json.loads(json.dumps(values))


WHOLE = _whole()


def places(value, path=()):
    """Yield the path of every value within a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from places(one, (*path, number))


PATHS = [path for path in places(WHOLE) if path]
OTHERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 100), st.floats(), st.text(max_size=5),
    st.sampled_from(["full", "int8", "graph", "eager", "resident", "host", "cuda:0", "cpu", "auto", -1, 0, 2**63, 1e400, math.nan]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(path, how, other):
    values = copy.deepcopy(WHOLE)
    owner = at(values, path[:-1])
    if how == "remove":
        del owner[path[-1]]
    elif how == "add" and isinstance(owner, dict):
        owner["surprise"] = other
    elif how == "repeat" and isinstance(owner, list):
        owner.append(owner[path[-1]])
    else:
        owner[path[-1]] = other
    return values


def test_the_whole_one_comes_back_equal():
    assert Plan.from_json(WHOLE).to_json() == WHOLE and str(Plan.from_json(WHOLE))
    assert Plan.from_json(changed(("execution", "towers"), "set", None)).execution.towers is None


# The path of a value, and what it may not be.
NO_PLAN = [
    (("surprise",), 1), (("placements", 0, "surprise"), 1), (("rates", "warp_Bps"), 1), (("request", "surprise"), 1),
    (("gpu_peak_bytes",), "many"), (("disk_bytes",), -1), (("placements",), 3), (("checkpoint_stamps", 0), ["a", 1]),
    (("gpu",), []), (("gpu", "weights"), -1), (("gpu", "weights"), True), (("gpu_budget_bytes",), 2**80),
    (("gpu_budget_bytes",), 1.5), (("execution_device",), "cuda:0; rm"), (("prefill_tokens",), 0), (("model_class",), None),
    (("adapter_stamps", "a", 0, 1), "1"), (("placements", 0, "tier"), "moon"), (("execution", "towers", "mode"), "fused"),
    (("execution", "step", "mode"), "warp"), (("request", "quant"), "q8_k"), (("card", "source"), "hearsay"),
    (("card", "capability"), "new"), (("card", "pcie"), "9.0 x1"), (("card", "memory_mib"), -1), (("card", "memory_mib"), "much"),
    (("card", "extra"), 1), (("card", "estimated"), 1), (("card", "name"), None), (("card", "tflops"), True),
]  # fmt: skip


@each("path, value", NO_PLAN)
def test_what_is_not_a_plan_is_refused_by_its_field(path, value):
    assert refused(Plan.from_json, changed(path, "set", value)).field == field_of(path)


@each("path", [("staging_slots",), ("placements", 0, "disk_bytes"), ("request", "answer_tokens")], where=str)
def test_a_missing_key_is_refused(path):
    assert refused(Plan.from_json, changed(path, "remove", None), match="is missing").field == field_of(path)


def field_of(path):
    return "plan" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path)


@settings(max_examples=examples(400), deadline=None)
@given(path=st.sampled_from(PATHS), how=st.sampled_from(["set", "remove", "add", "repeat"]), other=OTHERS)
def test_a_changed_file_is_refused_by_its_field_or_is_what_it_says(path, how, other):
    values = changed(path, how, other)
    try:
        made = Plan.from_json(values)
    except RequestError as exc:
        assert exc.field and len(str(exc)) < 4000
        return
    assert made.to_json() == values and str(made) and made.gpu_needed_bytes >= 0 and made.expected_s >= 0


@each("path", PATHS, where=lambda path: ".".join(map(str, path)))
def test_a_value_of_another_kind_is_never_taken(path):
    """An object where there was none, and a list where there was a text or a number."""
    for other in ({"surprise": object}, [[[]]]):
        assert refused(Plan.from_json, changed(path, "set", other)).field


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, PLAN_VERSION + 1, None, "4", 4.5])
def test_another_version_is_named_before_anything_else(version, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": version}), encoding="utf-8")
    error = raised(CheckpointError, Plan.load, file, match="another release wrote this plan")
    assert str(file) in str(error) and (error.field, error.value) == ("plan.version", version)
    assert error.allowed == (str(PLAN_VERSION),)


@pytest.mark.parametrize("name", ["adapter_bytes", "adapter_stamps"])
@pytest.mark.parametrize("named", [(), ("b",)])
def test_an_adapter_without_its_bytes_or_its_stamps_is_refused(name, named):
    """Its memory would not be counted, and a changed file would load."""
    values = {**WHOLE, name: dict.fromkeys(named, WHOLE[name]["a"])}
    error = refused(Plan.from_json, values)
    assert error.field == f"plan.{name}" and error.allowed == ("a",)


@pytest.mark.parametrize(("text", "said"), [
    *((text, "not JSON") for text in ("{", '{"a": ' * 3000 + "1" + "}" * 3000, "[" * 3000 + "]" * 3000)),
    ('{"version": ' + "9" * 5000 + "}", "not JSON"),
    *((text, "is not a saved plan") for text in ("[]", "3", "{}", '"plan"', "null")), (None, "cannot be read"),
])  # fmt: skip
def test_a_file_that_holds_no_plan_is_refused_with_its_path(text, said, tmp_path):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert raised(CheckpointError, Plan.load, path, match=said).path == str(path)
