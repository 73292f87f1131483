"""Other servers, asked for their adapter: llama-cpp-python with GGUF files, and `transformers serve`, which gives no logprobs.

Slow, and only where these servers are installed in an environment of their own (`make test-peers`); TRIMTAB_PEERS_PYTHON names
its Python.
"""

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import waiting
from tests.peers import tiny_llama
from trimtab.doctor.servers.report import examine
from trimtab.errors import RequestError
from trimtab.verification.server.verify import verify_remote

PYTHON = os.environ.get("TRIMTAB_PEERS_PYTHON", "")
HERE = Path(__file__).parent
START_S = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="TRIMTAB_PEERS_PYTHON names no Python with the servers (make test-peers)"),
]


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def run(*command):
    subprocess.run([PYTHON, *map(str, command)], check=True, timeout=START_S)


@contextmanager
def serving(port, command, log, ready):
    """Run a server until the address `ready` answers; yield its address."""
    # `transformers serve` answers a list of models with an error where there is no cache at all.
    cache = log.parent / "cache"
    cache.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        assert process.poll() is None, log.read_text("utf-8")[-3000:]
        with suppress(OSError):
            urllib.request.urlopen(f"{url}{ready}", timeout=5).close()
            return True

    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            waiting.until(is_ready, START_S)
            yield f"{url}/v1"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def base(work):
    return tiny_llama.build(work / "base")


@pytest.fixture(scope="module")
def adapter(work, base):
    return tiny_llama.build_adapter(base, work / "mine")


def verify(base, adapter, url, name, **options):
    return verify_remote(
        base, adapters={"mine": adapter}, against=url, remote_model=name, prompts=list(tiny_llama.QUESTIONS),
        send_prompts=True, quant="none", deadline_s=600, **options,
    )  # fmt: skip


# llama-cpp-python -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_cpp(work, base, adapter):
    """One server whose models are the base, the adapter, the adapter's name without it, and it with another scale."""
    files = work / "gguf"
    files.mkdir()
    run(HERE / "write_gguf.py", "base", base, files / "base.gguf")
    run(HERE / "write_gguf.py", "lora", base, adapter, files / "mine.gguf")
    shutil.copy(files / "mine.gguf", files / "scaled.gguf")
    port = free_port()
    plain = {"model": str(files / "base.gguf"), "n_ctx": 256, "logits_all": True, "n_threads": 1, "verbose": False}
    models = [
        {**plain, "model_alias": "base"}, {**plain, "model_alias": "mine", "lora_path": str(files / "mine.gguf")},
        {**plain, "model_alias": "unloaded"}, {**plain, "model_alias": "scaled", "lora_path": str(files / "scaled.gguf")},
    ]  # fmt: skip
    config = {"host": "127.0.0.1", "port": port, "models": models}
    (files / "config.json").write_text(json.dumps(config), "utf-8")
    # alpha / sqrt(r) in place of alpha / r.
    (files / "scales.json").write_text(json.dumps({str(files / "scaled.gguf"): tiny_llama.RANK**0.5}), "utf-8")
    command = [PYTHON, str(HERE / "llama_server.py"), str(files / "config.json"), str(files / "scales.json")]
    with serving(port, command, files / "log.txt", "/v1/models") as url:
        yield url


@pytest.mark.parametrize(
    ("name", "word", "fault"), [("mine", "alive", ""), ("unloaded", "ignored", "ignored"), ("scaled", "wrong", "scale")]
)
def test_llama_cpp_says_by_its_logprobs_what_it_holds(base, adapter, llama_cpp, name, word, fault):
    report = verify(base, adapter, llama_cpp, name, remote_base="base")
    assert (report.verdict.word, report.verdict.fault) == (word, fault), str(report)
    assert report.channels["text"].top > 0
    # Its tokens are counted as ours are: the GGUF's tokenizer is the checkpoint's.
    assert not [note for note in report.notes if "counts" in note]


def test_llama_cpp_is_told_without_its_base_too(base, adapter, llama_cpp):
    # Without its base nothing says how much of the difference is the precision's: small faults stay open.
    mine = verify(base, adapter, llama_cpp, "mine").verdict
    assert mine.is_as_a_whole and set(mine.unseen) <= {"another version of the adapter"}
    assert verify(base, adapter, llama_cpp, "unloaded").verdict.word == "ignored"


def test_llama_cpp_is_named_by_doctor(llama_cpp):
    identity = examine(llama_cpp).identity
    assert set(identity.models) == {"base", "mine", "unloaded", "scaled"} and identity.kind in ("", "llama.cpp")


# transformers serve ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers(work, base, adapter):
    """`transformers serve`, whose models are folders: the base, the base with the adapter embedded, and two faults."""
    made = {"base": base}
    for name, changes in (("served", {}), ("scaled", {"use_rslora": True})):
        folder = made[name] = work / f"transformers-{name}"
        shutil.copytree(base, folder)  # a model with an adapter embedded: the base lies beside it
        shutil.copy(adapter / "adapter_model.safetensors", folder)
        settings = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
        settings |= {**changes, "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    made["unloaded"] = work / "transformers-unloaded"
    shutil.copytree(base, made["unloaded"])
    port = free_port()
    command = [str(Path(PYTHON).parent / "transformers"), "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with serving(port, command, work / "transformers.log", "/health") as url:
        yield url, made


# Texts show no small fault: that the right adapter is there can be said as a whole only.
@pytest.mark.parametrize(("name", "word"), [("served", "cannot tell"), ("unloaded", "ignored"), ("scaled", "wrong")])
def test_transformers_serve_says_by_texts_what_it_holds(base, adapter, transformers, name, word):
    url, folders = transformers
    report = verify(base, adapter, url, str(folders[name]), remote_base=str(folders["base"]))
    assert report.channels["text"].top == 0
    assert report.refusals["text"], "it refuses logprobs"
    assert report.verdict.word == word, str(report)
    assert report.verdict.is_as_a_whole == (name == "served")


def test_a_model_that_transformers_serve_does_not_have_is_named(base, adapter, transformers):
    url, _ = transformers
    with pytest.raises(RequestError, match="answers no request"):
        verify(base, adapter, url, "no-such/model")
