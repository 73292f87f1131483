"""What the layers below the server say of themselves reaches no client: every error text of theirs is sent through."""

import ast
import importlib
import json
import re
from dataclasses import fields
from functools import cache
from types import SimpleNamespace

import pytest

from tests import ROOT
from trimtab.engine.chat import prompt
from trimtab.errors import CheckpointError, DeviceError, DoesNotFitError, RequestError
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.api.routes import REQUESTS
from trimtab.serve.contract.errors import ALSO_SENT, HIDDEN, error_json, error_response, plain_error
from trimtab.serve.contract.job import Job
from trimtab.serve.worker.supervisor import ModelFailedError

PACKAGE = ROOT / "trimtab"
ROOMS = ("engine", "planning", "checkpoint", "adapters")
WIRE = {field.alias or name for kind in REQUESTS.values() for name, field in kind.model_fields.items()}
ARGUMENTS = {field.name for kind in (LoadRequest, GenerateRequest) for field in fields(kind)} - WIRE
# A name with an underscore is no word of English; another one is an argument where a value follows it.
WORDS = [rf"\b{name}\b" for name in ARGUMENTS if "_" in name] + [rf"\b{name}=" for name in ARGUMENTS]
FOREIGN = re.compile("|".join([*WORDS, r"--[a-z]", r"\bplan (?:with|again)", "0x[0-9a-f]{6}", "`trimtab"]), re.IGNORECASE)
CLASSES = {
    "CheckpointError", "AdapterError", "DeviceError", "DoesNotFitError", "UpstreamError", "ParityError", "RequestError",
    "TrimtabError",
}  # fmt: skip


def text_of(node, constants):
    """Return the text of an expression; what is only known when it runs is an X."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, constants) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body, constants)} {text_of(node.orelse, constants)}"
    if isinstance(node, (ast.List, ast.Tuple)):
        return " ".join(text_of(item, constants) for item in node.elts)
    if isinstance(node, ast.Name) and isinstance(getattr(constants, node.id, None), str):
        return getattr(constants, node.id)
    return "X"


@cache
def raised():
    """Return (where, class, reason, hint) of every error of ours that the rooms below the server make."""
    found = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = getattr(getattr(node, "func", None), "id", "")
                if isinstance(node, ast.Call) and name in CLASSES and node.args:
                    hint = " ".join(text_of(item.value, module) for item in node.keywords if item.arg == "hint")
                    reason = " ".join(text_of(argument, module) for argument in node.args)
                    found.append((f"{path.name}:{node.lineno}", name, reason, hint))
    return found


def test_the_words_of_bodies_are_those_of_their_schemas():
    assert {field.name for kind in (LoadRequest, GenerateRequest) for field in fields(kind)} & WIRE == ALSO_SENT


def test_the_texts_are_there():
    """Else the test below would look at nothing."""
    assert len(raised()) > 200 and sum(bool(FOREIGN.search(hint)) for *_, hint in raised()) > 10
    assert any("max_new_tokens" in hint for *_, hint in raised())


@pytest.mark.parametrize("as_failure", [False, True])
def test_no_error_text_of_a_lower_layer_has_its_words_in_an_answer(as_failure):
    for where, name, reason, hint in raised():
        fields = {"hint": hint, "path": "", "problems": [reason] if name == "AdapterError" else []}
        error = {"class": name, "message": f"{reason}. {hint}" if hint else reason, "fields": fields}
        if as_failure:
            answer = error_json(plain_error(ModelFailedError(error)))[1]
        else:
            if name == "RequestError" and FOREIGN.search(reason):
                continue  # of a request to load: it reaches a client as a failure alone
            answer = error_json(error)[1]
        text = json.dumps(answer)
        assert not FOREIGN.search(text), f"{where}: {FOREIGN.search(text)[0]!r} in {text}"


@pytest.mark.parametrize("error, kept, left_out", [
    (
        DoesNotFitError("no room", block=None, device="cuda:0", needed_bytes=9, budget_bytes=1, hint="Plan with batch=1"),
        "no room", "batch",
    ),
    (DeviceError("out of memory", device="cuda:0", hint="Give --gpu-memory 4GiB"), "out of memory", "--gpu"),
    (CheckpointError("is damaged", path="model.safetensors", hint="Make the plan again"), "is damaged", "plan"),
    (DeviceError("the keep_unquantized list is wrong", device="cpu"), HIDDEN, "keep_unquantized"),
    (DeviceError("<Decoder object at 0x7fa0b8c1d2e0> failed", device="cpu"), "failed", "0x"),
])  # fmt: skip
def test_what_a_client_cannot_follow_is_left_out_and_the_rest_stays(error, kept, left_out):
    text = json.dumps(error_json(plain_error(error))[1])
    assert kept in text and left_out not in text


def test_a_text_to_embed_that_is_too_long_hears_nothing_of_an_answer():
    model = SimpleNamespace(context_tokens=8)
    errors = {}
    for kind, most in (("embedding", 0), ("answer", 4)):
        with pytest.raises(RequestError) as caught:
            prompt.check_fits(model, SimpleNamespace(prompt_tokens=9), most)
        job = Job("a", {"text": "long"}, GenerateRequest(), kind=kind)
        errors[kind] = for_client(caught.value, job)
    assert str(errors["embedding"]) == "input: the prompt has 9 tokens, more than the context of 8. Shorten it"
    assert errors["answer"].field == "prompt" and errors["answer"].hint == "Shorten it, or lower max_tokens"


@pytest.mark.parametrize(("job", "field", "expected"), [
    ({"prompt": [1], "kind": "text"}, "prompt", "tokens"), ({"prompt": {"text": "a"}, "kind": "tokens"}, "prompt", "prompt"),
    ({"prompt": {"text": "a"}, "kind": "embedding"}, "prompt", "input"), ({"prompt": "a"}, "system", "messages"),
    ({"prompt": "a"}, "max_new_tokens", "max_tokens"), ({"prompt": "a"}, "adapter", "model"),
    ({"prompt": "a"}, "template_kwargs", "chat_template_kwargs"),
    ({"prompt": [{"role": "user", "content": "a"}, {"role": "tool", "name": "f", "content": "b"},
                 {"role": "user", "name": "Ann", "content": "c"}]}, "name", "messages[2].name"),
])  # fmt: skip
def test_an_error_names_the_field_that_the_route_has(job, field, expected):
    made = Job("a", job.pop("prompt"), GenerateRequest(max_new_tokens=1), **job)
    assert for_client(RequestError("is wrong", field=field), made).field == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_for_which_json_has_no_number_is_text(value):
    answer = error_response(*error_json(RequestError("is too large", field="n", value=value).to_dict()))
    assert answer.status_code == 400 and json.loads(answer.body)["error"]["fields"]["value"] == str(value)
