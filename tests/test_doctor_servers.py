"""Which server answers at an address, and which known bugs of adapters apply to its release."""

import json
import re

import httpx2
import pytest

from trimtab import cli
from trimtab.doctor.servers import report as servers
from trimtab.doctor.servers.known import APPLIES, FAULTS, FIXED, MAY_APPLY, ServerBug, numbers
from trimtab.doctor.servers.report import examine
from trimtab.errors import RequestError


def answering(**paths):
    """A server that knows these addresses. paths: "a__b" stands for "/a/b"."""
    known = {
        "/" + name.replace("__", "/").replace("_", "-" if name.startswith("lora") else "_"): value
        for name, value in paths.items()
    }

    def answer(request):
        value = known.get(request.url.path)
        return httpx2.Response(404, json={"error": "no"}) if value is None else httpx2.Response(200, json=value)

    return httpx2.MockTransport(answer)


def models(*ids, owner="x", parent=None):
    return {"data": [{"id": name, "owned_by": owner, "parent": parent} for name in ids]}


def test_vllm_is_known_by_its_version_and_its_open_bugs_are_told():
    transport = answering(
        version={"version": "0.19.2rc1.dev134"}, v1__models=models("base", "mine", owner="vllm", parent="b")
    )
    found = examine("http://host:8000/v1", transport=transport)
    assert (found.identity.kind, found.identity.version) == ("vLLM", "0.19.2rc1.dev134")
    assert found.identity.models == ("base", "mine")
    assert [bug.id for bug in found.bugs(APPLIES)] == ["V1"]
    text = str(found)
    assert "https://github.com/vllm-project/vllm/issues/41754" in text
    assert "reported with this release:" in text
    assert "check first:\n  1. the model name in the request is the adapter's name" in text


def test_ollama_sglang_and_llama_cpp_are_told_apart():
    told = {
        "Ollama": answering(api__version={"version": "0.13.0"}),
        "SGLang": answering(get_server_info={"version": "0.5.12"}),
        "llama.cpp": answering(
            props={"build_info": "b10121-abc"}, lora_adapters=[{"id": 0, "path": "a.gguf", "scale": 0.0}]
        ),
        "trimtab": answering(v1__models=models("demo", owner="trimtab")),
        "": answering(v1__models=models("gpt", owner="someone")),
    }
    reports = {name: examine("http://host:1", transport=transport) for name, transport in told.items()}
    assert {name: found.identity.kind for name, found in reports.items()} == {name: name for name in told}
    assert reports["llama.cpp"].identity.adapters == ("a.gguf (scale 0.0)",)
    assert [bug.id for bug in reports["llama.cpp"].bugs(APPLIES)] == ["L2"]
    assert [bug.id for bug in reports["SGLang"].bugs(APPLIES)] == ["S3"]
    assert "a server that is not known here" in str(reports[""])


def test_a_bug_applies_to_the_release_it_was_seen_with_and_not_from_the_fix_on():
    bug = ServerBug(
        id="X1",
        title="t",
        when="w",
        way_round="r",
        sources=("https://x",),
        state="s",
        read="r",
        seen="1.2",
        fixed_in="1.4.0",
    )
    assert [bug.standing(version) for version in ("1.2", "1.3", "1.4.0", "1.10", None, "nightly")] == [
        APPLIES, MAY_APPLY, FIXED, FIXED, MAY_APPLY, MAY_APPLY
    ]  # fmt: skip
    assert numbers("b10121-abc") == (10121,)
    assert numbers("v0.5.12.post1") == (0, 5, 12)


@pytest.mark.parametrize("server", servers.SERVERS, ids=lambda server: server.name)
def test_every_entry_has_a_source_and_a_name_of_its_own(server):
    ids = [bug.id for bug in server.bugs]
    assert len(set(ids)) == len(ids)
    assert server.checks
    for bug in server.bugs:
        assert bug.fault in ("", *FAULTS)
        assert bug.title and bug.when and bug.way_round and bug.state
        for source in bug.sources:
            assert re.fullmatch(
                r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|https://github\.com/\S+/blob/[0-9a-f]{40}/\S+",
                source,
            )


def test_hostile_answers_are_shown_plain_and_bounded():
    evil = "\x1b[2J" + "x" * 5000
    transport = answering(version={"version": evil}, v1__models=models(*[evil] * 1000, owner="vllm"))
    text = str(examine("http://host:1", transport=transport))
    assert "\x1b" not in text
    assert len(text) < 60_000
    for odd in ([], "x", {"data": 3}, {"data": [3, {"id": 4}]}, None):
        assert examine("http://host:1", transport=answering(v1__models=odd)).identity.kind == ""


def test_flags_without_effect_beside_an_address_are_refused(capsys):
    for flags, field in ((("--matrix",), "--matrix"), (("--quant", "nf4"), "--quant")):
        assert cli.main(["doctor", "http://127.0.0.1:9/v1", *flags, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == field
    assert cli.main(["doctor", "--api-key-env", "X", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == "--api-key-env"


def test_an_address_where_nothing_answers_is_an_error():
    def nobody(request):
        raise httpx2.ConnectError("refused")

    with pytest.raises(RequestError) as caught:
        examine("http://host:1/v1", transport=httpx2.MockTransport(nobody))
    assert (caught.value.field, caught.value.value) == ("url", "http://host:1")
