"""Which server answers at an address, and which known bugs of adapters apply to its release."""

import json
import re

import httpx2
import pytest

from tests.raised import refused
from trimtab.cli import main
from trimtab.doctor.servers import report
from trimtab.doctor.servers.known import APPLIES, FAULTS, FIXED, LATER, MAY_APPLY, MERGED, ServerBug, numbers
from trimtab.doctor.servers.report import examine


def answering(**paths):
    """A server that knows these addresses. paths: "a__b" stands for "/a/b"."""
    known = {
        "/" + name.replace("__", "/").replace("_", "-" if name.startswith("lora") else "_"): value for name, value in paths.items()
    }

    def answer(request):
        value = known.get(request.url.path)
        return httpx2.Response(404, json={"error": "no"}) if value is None else httpx2.Response(200, json=value)

    return httpx2.MockTransport(answer)


def models(*ids, owner="x", parent=None):
    return {"data": [{"id": name, "owned_by": owner, "parent": parent} for name in ids]}


def test_vllm_is_known_by_its_version_and_its_open_bugs_are_told():
    transport = answering(version={"version": "0.19.2rc1.dev134"}, v1__models=models("base", "mine", owner="vllm", parent="b"))
    found = examine("http://host:8000/v1", transport=transport)
    assert (found.identity.kind, found.identity.version) == ("vLLM", "0.19.2rc1.dev134")
    assert found.identity.models == ("base", "mine") and [bug.id for bug in found.bugs(APPLIES)] == ["V1", "V4"]
    text = str(found)
    assert "https://github.com/vllm-project/vllm/issues/41754" in text
    assert "applies to this release\n" in text
    assert "check first\n1.  the model name in the request is the adapter's name" in text


def test_ollama_sglang_and_llama_cpp_are_told_apart():
    told = {
        "Ollama": answering(api__version={"version": "0.13.0"}), "SGLang": answering(get_server_info={"version": "0.5.12"}),
        "llama.cpp": answering(props={"build_info": "b10121-abc"}, lora_adapters=[{"id": 0, "path": "a.gguf", "scale": 0.0}]),
        "trimtab": answering(v1__models=models("demo", owner="trimtab")), "": answering(v1__models=models("gpt", owner="someone")),
    }  # fmt: skip
    reports = {name: examine("http://host:1", transport=transport) for name, transport in told.items()}
    assert {name: found.identity.kind for name, found in reports.items()} == {name: name for name in told}
    assert reports["llama.cpp"].identity.adapters == ("a.gguf (scale 0.0)",)
    assert [bug.id for bug in reports["llama.cpp"].bugs(APPLIES)] == ["L2"]
    assert [bug.id for bug in reports["SGLang"].bugs(APPLIES)] == ["S3"] and "an unknown server" in str(reports[""])


def test_a_bug_applies_to_the_release_it_was_seen_with_and_not_from_the_fix_on():
    bug = ServerBug(
        id="X1", title="t", when="w", way_round="r", sources=("https://x",), state="s", read="r", seen="1.2", fixed_in="1.4.0"
    )
    assert [bug.standing(version) for version in ("1.2", "1.3", "1.4.0", "1.10", None, "nightly")] == [
        APPLIES, MAY_APPLY, FIXED, FIXED, MAY_APPLY, MAY_APPLY
    ]  # fmt: skip
    assert numbers("b10121-abc") == (10121,) and numbers("v0.5.12.post1") == (0, 5, 12, 1)
    assert numbers("0.4.6") < numbers("0.4.6.post1") < numbers("0.4.6.post2") < numbers("0.4.7")


# Entry -> releases on both sides of a change, and what holds there.
CHANGES = {
    "V4": (("0.18.1", LATER), ("0.19.0", APPLIES), ("0.28.0", APPLIES)),
    "V6": (("0.6.6.post1", MAY_APPLY), ("0.7.0", FIXED), ("0.12.11", FIXED)),
    "V7": (("0.29.0", MAY_APPLY), ("0.30.0", FIXED), (None, MAY_APPLY)), "S4": (("0.4.6.post1", MAY_APPLY), ("0.4.6.post2", FIXED)),
    "S5": (("0.5.3.post3", MAY_APPLY), ("0.5.4", FIXED)), "L4": (("b3825", MAY_APPLY), ("b3826-ea9c32be", FIXED)),
    "O1": (("0.1.29", MERGED), ("0.34.1", MERGED)), "O5": (("0.12.10", MAY_APPLY), ("0.12.11", FIXED)),
    "O6": (("0.34.0", LATER), ("0.34.1", APPLIES), ("0.40.0", APPLIES)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_an_entry_changes_with_the_release(name):
    bug = next(bug for server in report.SERVERS for bug in server.bugs if bug.id == name)
    assert [bug.standing(version) for version, _ in CHANGES[name]] == [standing for _, standing in CHANGES[name]]


@pytest.mark.parametrize("server", report.SERVERS, ids=lambda server: server.name)
def test_each_server_has_an_entry_whose_release_is_known(server):
    assert {bug.id for bug in server.bugs if bug.since or bug.fixed_in} & set(CHANGES)


def test_three_releases_of_vllm_get_three_answers():
    def text(version):
        return str(examine("http://host:1", transport=answering(version={"version": version})))

    assert len({text(version).partition("\n")[2] for version in ("0.6.3", "0.12.11", "0.30.0")}) == 3
    assert "fixed in this release\n" not in text("0.6.3")
    assert re.search(r"came with a later release\nV4 .*\(since 0\.19\.0: ", text("0.12.11"))
    assert re.search(r"fixed in this release\nV6 .*\nV7 .*\(fixed in 0\.30\.0: ", text("0.30.0"))
    # What is fixed stands nowhere else.
    assert text("0.30.0").count("\nV7 ") == 1


def test_a_merged_fix_of_unknown_release_is_said_apart():
    text = str(examine("http://host:1", transport=answering(api__version={"version": "0.20.0"})))
    assert "fixed upstream, release not known\nO1 " in text
    assert text.index("may apply") < text.index("fixed upstream")


@pytest.mark.parametrize("server", report.SERVERS, ids=lambda server: server.name)
def test_every_entry_has_a_source_and_a_name_of_its_own(server):
    ids = [bug.id for bug in server.bugs]
    assert len(set(ids)) == len(ids)
    assert server.checks
    for bug in server.bugs:
        assert bug.fault in ("", *FAULTS) and bug.title and bug.when and bug.way_round and bug.state
        assert bool(bug.evidence) == bool(bug.since or bug.fixed_in) and not (bug.merged and bug.fixed_in)
        for source in bug.sources:
            assert re.fullmatch(
                r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|https://github\.com/\S+/blob/[0-9a-f]{40}/\S+", source
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
        assert main.main(["doctor", "http://127.0.0.1:9/v1", *flags, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == field
    assert main.main(["doctor", "--api-key-env", "X", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == "--api-key-env"


def test_the_command_asks_the_address(monkeypatch, capsys):
    asked = []

    def examined(address, *, key):
        asked.append((address, key))
        return examine(address, key=key, transport=answering(version={"version": "0.11.0"}, v1__models=models("m", owner="vllm")))

    monkeypatch.setattr("trimtab.doctor.servers.report.examine", examined)
    monkeypatch.setenv("KEY", "secret")
    for flags in ((), ("--json",), ("--color", "never", "--threads", "1"), ("--api-key-env", "KEY")):
        assert main.main(["doctor", "http://host:1/v1", *flags]) == 0
        assert "vllm" in capsys.readouterr().out.lower()
    assert asked == [("http://host:1/v1", None)] * 3 + [("http://host:1/v1", "secret")]


def test_an_address_where_nothing_answers_is_an_error():
    def nobody(request):
        raise httpx2.ConnectError("refused")

    error = refused(lambda: examine("http://host:1/v1", transport=httpx2.MockTransport(nobody)))
    assert (error.field, error.value) == ("url", "http://host:1")
