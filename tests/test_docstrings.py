"""The docstrings of the public names: every argument and field is named, and what raises says so."""

import dataclasses
import inspect
import re

import trimtab
import trimtab.bridge
from tests.rules import each
from trimtab.doctor.probes.runner import run_probes
from trimtab.engine.batch.generate import Answer, TokenLogprob
from trimtab.engine.calls.conversation import Conversation, Turn
from trimtab.engine.model import LoadedModel
from trimtab.engine.model_calls import Asking

CLASSES = (
    trimtab.LoadRequest, trimtab.GenerateRequest, trimtab.Plan, LoadedModel, Asking, Conversation, Turn, Answer, TokenLogprob,
)  # fmt: skip
# One word that says what the argument is, where the sentence would only repeat it.
PLAIN = {"self", "cls", "text"}


def public_functions():
    for name in trimtab.__all__:
        if inspect.isfunction(found := getattr(trimtab, name)):
            yield name, found
    for name in trimtab.bridge.__all__:
        yield f"bridge.{name}", getattr(trimtab.bridge, name)
    yield "run_probes", run_probes
    for kind in CLASSES:
        for name, member in vars(kind).items():
            inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(inner):
                yield f"{kind.__name__}.{name}", inner


def mentions(text, name):
    return re.search(rf"\b{name}\b", text) is not None


@each("name, function", public_functions(), where=lambda item: item[0])
def test_public_functions_name_their_arguments_and_errors(name, function):
    text = inspect.getdoc(function) or ""
    assert text, "no docstring"
    arguments = [one for one in inspect.signature(function).parameters.values() if one.kind != one.VAR_KEYWORD]
    names = [one.name for one in arguments if one.name not in PLAIN]
    if len(names) > 1:
        assert [name for name in names if not mentions(text, name)] == []
    if re.search(r"\braise \w+Error", inspect.getsource(function)):
        assert "Error" in text
    if "Tensor" in str(inspect.signature(function).return_annotation):
        assert re.search(r"\[\w[\w +]*, ", text), "no shape"


@each("kind", [kind for kind in CLASSES if dataclasses.is_dataclass(kind)])
def test_public_values_name_their_fields(kind):
    text = inspect.getdoc(kind) or ""
    assert [one.name for one in dataclasses.fields(kind) if one.name not in PLAIN and not mentions(text, one.name)] == []


def test_a_missing_argument_is_seen():
    assert not mentions("rows: together", "row") and mentions("row, rows: of a batch", "row")
