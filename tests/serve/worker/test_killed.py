"""A worker killed in the middle of steps: what has said nothing yet is answered by the next one, with the right words."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import trimtab
from bench import client
from bench.served import Served
from tests import counting
from tests.lent import DEVICE
from tests.long_runs import slow_on_cpu

TOKENS, SLOT_BYTES = 240, 2**20
TEMPLATE = "{% for one in messages %}{{ one.content if one.content is string else one.content[0].text }}{% endfor %}"
# The first worker of a server gets this plan, as a later one gets that of the first.
SERVES = """
import json, os, trimtab.__main__
from trimtab.serve.worker.supervisor import Supervisor
made = Supervisor.__init__
def with_plan(self, *given, **named):
    made(self, *given, **named)
    self.plan = json.loads(os.environ["PLAN"])
Supervisor.__init__ = with_plan
trimtab.__main__.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bench/served.py reads /proc")
@pytest.mark.parametrize("slots", [slow_on_cpu(0)] if DEVICE == "cpu" else [0, 2])
def test_answers_of_a_mixture_outlive_its_worker_or_end_by_name(slots, tmp_path):
    """A wrong expert, slot or adapter would be a wrong word. Experts in slots: on a GPU."""
    base, adapter = counting.build(tmp_path / "base"), str(counting.adapter(tmp_path / "german", "german"))
    words = {"<pad>": 0, "<eos>": 1} | {word: counting.ids(word)[0] for word in (*counting.ENGLISH, *counting.GERMAN)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=TEMPLATE).save_pretrained(base)
    given = {"context": 256, "quant": "nf4", "experts": "nf4", "device": DEVICE if DEVICE == "cpu" else "cuda:0"}
    plan = trimtab.plan(base, adapters={"german": adapter}, batch=2, **given)
    gpu = plan.gpu | ({"expert_slots": SLOT_BYTES} if slots else {})
    plan = replace(plan, execution=replace(plan.execution, expert_slots=slots), gpu=gpu)
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments = ["serve", str(base), "--name", "counts", "--adapter", f"german={adapter}", "--rows", "2", "--retry", *flags]
    environment = {"PLAN": json.dumps(plan.to_json())}
    asked = [(name, word) for word in counting.ENGLISH[:4] for name in (None, "german")]
    with Served(arguments, command=("-c", SERVES), environment=environment) as server:
        first = iter([True])  # of all pieces of text: kills

        def ask(one):
            body = client.chat_body(one[1], model=one[0] or "counts", max_tokens=TOKENS)
            return client.ask(server.address, body, on_piece=lambda _: not next(first, False) or bool(server.kill_worker()))

        with ThreadPoolExecutor(len(asked)) as pool:
            found = [*pool.map(ask, asked), *map(ask, asked)]
        status = server.status()
    shares = {share["name"]: share["planned_bytes"] for share in status["numbers"]["memory_shares"]}
    assert shares["weights"] == sum(gpu.get(name, 0) for name in ("weights", "fixed", "expert_slots"))  # it had this plan
    lost = [one for one in found[: len(asked)] if one.ended == "error"]  # of two rows, which had spoken
    assert status["restarts"] == 1 and 1 <= len(lost) <= 2 and {one.error for one in lost} == {"WorkerDiedError"}
    for (name, word), one in zip(asked * 2, found, strict=True):
        said, wanted = one.text.split(), counting.counted(word, TOKENS, name)
        assert said and said == (wanted[: len(said)] if one in lost else wanted)
