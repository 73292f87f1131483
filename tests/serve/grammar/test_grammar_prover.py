"""Grammars that never end, take all memory or lose their client: the process that compiles them is ended, and others go on."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, Future
from contextlib import closing
from functools import partial

import psutil
import pytest

from tests import talking, waiting
from tests.raised import refused
from trimtab.errors import DeviceError, RequestError
from trimtab.serve.grammar import prover as grammar_prover
from trimtab.serve.grammar.constraint import Grammar, HeldMemory
from trimtab.serve.grammar.prover import GrammarProver, Proof, ProverError
from trimtab.serve.grammar.source import GrammarSource
from trimtab.serve.scheduling import compiling
from trimtab.serve.scheduling.compiling import Compiling

WAIT_S = 20.0
# Stands for the process: does what the schema says. Its first frame is the vocabulary.
STUB = """
import json, os, struct, sys, threading
def read():
    return sys.stdin.buffer.read(struct.unpack("<Q", sys.stdin.buffer.read(8))[0])
def write(data):
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()
assert read() == b"vocabulary"
write(b"")
while True:
    do = json.loads(read())["schema"].get("do")
    if do == "spin":
        while True: pass
    if do == "eat":
        held = bytearray(64 * 2**20)
        threading.Event().wait(60)
    if do == "die":
        os.abort() if hasattr(os, "abort") else os._exit(9)
    write(json.dumps({"grammars": {"": do}, "seconds": 0}).encode())
"""
COMMAND = [sys.executable, "-c", STUB]
ENDLESS = {"type": "integer", "allOf": [{"multipleOf": value} for value in (3, 7, 11, 13, 17, 19, 23)]}


def source(do):
    return GrammarSource("here", schema={"do": do})


@pytest.fixture
def prover():
    made = GrammarProver(COMMAND)
    yield made
    made.close()


def prove(prover, do, is_wanted=lambda: True):
    return prover.prove(source(do), b"vocabulary", is_wanted)


@pytest.mark.parametrize("do, limit, value, words", [
    ("spin", "MOST_S", 0.2, "longer than 0.2 s to compile"), ("eat", "MOST_BYTES", 32 * 2**20, "more than 32 MiB to compile"),
])  # fmt: skip
def test_a_grammar_beyond_a_limit_ends_its_process_and_is_refused(prover, monkeypatch, do, limit, value, words):
    assert prove(prover, "a").grammars == {"": "a"}
    pid = prover.pid
    monkeypatch.setattr(grammar_prover, limit, value)
    error = refused(prove, prover, do, match=words)
    assert error.field == "here" and waiting.is_gone(pid) and prover.pid is None
    prover.renew()  # as its thread does, before the next grammar comes
    assert prover.pid not in (None, pid) and prove(prover, "b").grammars == {"": "b"}


def test_a_grammar_whose_client_leaves_ends_its_process(prover):
    prover.start(b"vocabulary")
    pid, asked = prover.pid, []
    with pytest.raises(CancelledError):
        prove(prover, "spin", lambda: bool(asked.append(time.monotonic())))
    assert waiting.is_gone(pid) and len(asked) == 1


def test_a_grammar_that_ends_its_process_is_refused_and_the_next_one_is_compiled(prover):
    with pytest.raises(RequestError, match="ended the process that compiles it"):
        prove(prover, "die")
    assert prove(prover, "b").grammars == {"": "b"}


def test_a_process_of_low_priority_is_not_used_again(prover, monkeypatch):
    monkeypatch.setattr(grammar_prover, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar_prover, "MOST_S", 0.3)
    monkeypatch.setattr(grammar_prover, "POLL_S", 0.01)
    if os.name == "posix":  # below these tests, which may be of low priority themselves
        monkeypatch.setattr(grammar_prover, "SLOW_NICE", psutil.Process().nice() + 5)
    nices, leave = [], grammar_prover.leave_cores

    def left(pid, nice):
        leave(pid, nice)
        nices.append(psutil.Process(pid).nice())

    monkeypatch.setattr(grammar_prover, "leave_cores", left)
    with pytest.raises(RequestError):
        prove(prover, "spin")
    assert len(nices) == 1 and nices[0] != psutil.Process().nice()
    prover.renew()
    assert psutil.Process(prover.pid).nice() == psutil.Process().nice()


def test_a_process_that_cannot_be_started_says_so():
    for command in ([sys.executable, "-c", "raise SystemExit(3)"], ["no such program"]):
        with pytest.raises(ProverError, match=r"exit code 3|cannot be started"):
            prove(GrammarProver(command), "a")


# The threads ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(compiling, "GrammarProver", partial(GrammarProver, COMMAND))
    return Compiling()


def submit(made, client, do):
    future = Future()
    made.submit(client, future, lambda: made.prove(source(do), b"vocabulary"))
    return future


def test_a_client_who_leaves_ends_its_process_and_others_go_on_before(made):
    slow = submit(made, "a", "spin")
    waiting.until(lambda: made.pids)
    mine = [submit(made, "a", f"a{i}") for i in range(3)]
    for i in range(20):  # another client's go past all of the first one's
        assert submit(made, "b", f"b{i}").result(WAIT_S).grammars == {"": f"b{i}"}
    assert not slow.done() and not any(one.done() for one in mine)
    busy = set(made.pids)
    assert slow.cancel()
    assert [one.result(WAIT_S).grammars[""] for one in mine] == ["a0", "a1", "a2"]
    assert len([pid for pid in busy if waiting.is_gone(pid)]) == 1


def test_what_was_compiled_is_not_compiled_again(made, monkeypatch):
    first = submit(made, "a", "a").result(WAIT_S)
    monkeypatch.setattr(GrammarProver, "prove", None)
    assert submit(made, "b", "a").result(WAIT_S) is first


def test_proofs_are_kept_up_to_a_size(made, monkeypatch):
    monkeypatch.setattr(compiling, "KEPT_LETTERS", 8)
    for name in ("aaa", "bbb", "ccc"):
        submit(made, "a", name).result(WAIT_S)
    again = submit(made, "a", "ccc").result(WAIT_S)
    assert again is submit(made, "a", "ccc").result(WAIT_S) and made._line._letters == 6


def test_processes_end_with_their_owner(monkeypatch):
    monkeypatch.setattr(compiling, "GrammarProver", partial(GrammarProver, COMMAND))
    owner = Compiling()
    submit(owner, "a", "a").result(WAIT_S)
    pids = owner.pids
    assert len(pids) == 1 and not waiting.is_gone(pids[0])
    del owner
    waiting.until(lambda: all(map(waiting.is_gone, pids)))


# The process itself -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return talking._tokenizer()


FUNCTIONS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}}]


def test_the_process_gives_the_same_grammars_as_here(tokenizer):
    owner = Compiling()
    here, there = Grammar(tokenizer, [1]), Grammar(tokenizer, [1], owner.prove)
    proofs = []
    for grammar in (here, there):
        kept = []
        grammar._prove = partial(_kept, kept, grammar._prove, here)
        grammar.constraint({"type": "object", "properties": {"a": {"type": "integer"}}})
        for form in ("gemma4", "hermes", "qwen-xml", "llama", "mistral", "mistral-args"):
            grammar.calls(form, FUNCTIONS, several=True)
        with pytest.raises(RequestError, match=r"cannot be enforced \(Unimplemented keys"):
            grammar.constraint({"type": "object", "not": {}})
        proofs.append(kept)
    assert proofs[0] == proofs[1] and len(proofs[0]) == 7


def _kept(kept, prove, here, source, vocabulary):
    from trimtab.serve.grammar.child import answer

    if prove is None:
        found = answer(here._tokenizer, source)
        if "reason" in found:
            raise RequestError(found["reason"], field=found["field"])
        proof = grammar_prover.Proof(found["grammars"], 0)
    else:
        proof = prove(source, vocabulary)
    kept.append(dict(proof.grammars))
    return proof


def test_the_process_needs_neither_torch_nor_transformers():
    code = "import trimtab.serve.grammar.child, llguidance, sys; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


PARENT = """
from concurrent.futures import Future
from tests import talking, waiting
from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.grammar.constraint import Grammar

owner = Compiling()
grammar = Grammar(talking._tokenizer(), [1], owner.prove)
grammar.constraint({})
owner.submit("a", Future(), lambda: grammar.constraint(%r))
print(*waiting.until(lambda: owner.pids), flush=True)
waiting.hang()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_that_compiles_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT % ENDLESS], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(one) for one in parent.stdout.readline().split()]
        spinning = [psutil.Process(pid) for pid in pids]
        waiting.until(lambda: all(one.cpu_times().user > 0 for one in spinning))
        assert spinning
        parent.kill()
    waiting.until(lambda: all(map(waiting.is_gone, pids)))


@pytest.mark.skipif(os.name != "posix", reason="needs resource")
def test_the_system_ends_a_process_that_takes_memory_between_two_looks(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_prover, "POLL_S", 30.0)  # nobody looks
    code = (
        "import trimtab.serve.grammar.child as one; one.ROOM_BYTES = 32 * 2**20;"
        "one.answer = lambda *_: bytearray(256 * 2**20) and {'grammars': {}}; one.main()"
    )
    prover = GrammarProver([sys.executable, "-c", code])
    vocabulary = Grammar(tokenizer, [1]).vocabulary
    try:
        with pytest.raises(RequestError, match="ended the process"):
            prover.prove(source("a"), vocabulary, lambda: True)
    finally:
        prover.close()


def test_the_grammars_of_all_answers_have_a_limit_together(tokenizer):
    held = HeldMemory(1000)
    held.take(300, "a"), held.take(200, "a")  # alone: half
    with pytest.raises(DeviceError, match="grammars of your answers"):
        held.take(1, "a")
    held.take(250, "b")  # half of what others leave
    with pytest.raises(DeviceError):
        held.take(1, "b")
    held.take(125, "c"), held.take(0, "a")
    assert held.nbytes == 875
    held.give_back(500, "a"), held.give_back(0, "a"), held.give_back(125, "c")
    held.take(250, "b")
    with pytest.raises(DeviceError):
        held.take(1, "b")
    held.give_back(250, "b"), held.give_back(250, "b")
    assert held.nbytes == 0
    grammar = Grammar(tokenizer, [1], lambda *_: grammar_prover.Proof(GrammarSource("here").grammars(), 7))
    constraint = grammar.constraint({}, client="a")
    assert grammar._held.nbytes == 7 and grammar._held._by_client == {"a": 7}
    del constraint
    assert grammar._held.nbytes == 0


def test_a_grammar_that_is_dropped_while_another_is_counted_gives_its_memory_back():
    held = HeldMemory(1000)
    held.take(400, "a")

    class Collected(int):
        """Bytes whose sum runs a collection, in which an answer of the same client is dropped."""

        def __radd__(self, other):
            held.give_back(400, "a")
            return int(other) + int(self)

    held.take(Collected(50), "a")
    assert held.nbytes == 50
    held.give_back(50, "a")
    assert held.nbytes == 0 and not held._by_client


@pytest.mark.parametrize("proof, words", [
    (Proof({"": "no grammar"}, 7, 2.6), "2.6 s of processor time"), (Proof({"": "no grammar"}, 300 * 2**20), "300 MiB"),
])  # fmt: skip
def test_what_nearly_reached_a_limit_in_the_process_is_not_compiled_again(tokenizer, proof, words):
    grammar = Grammar(tokenizer, [1], lambda *_: proof)
    with pytest.raises(RequestError, match=words):
        grammar.constraint({}, client="a")
    assert grammar._held.nbytes == 0


def test_the_process_says_how_much_processor_time_a_grammar_took(tokenizer):
    with closing(GrammarProver()) as prover:
        proof = prover.prove(
            GrammarSource("here", schema={"type": "integer", "multipleOf": 9973}), Grammar(tokenizer, [1]).vocabulary, lambda: True
        )
    assert 0 < proof.seconds < 5
