"""`trimtab pull` and `--pull`, against a stand-in of the hub's API on this machine."""

import json
import os
import re
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests import gguf_files, gguf_towers, pico
from trimtab import demo
from trimtab.cli import main

COMMIT, OLD = "a" * 40, "b" * 40


class Hub(ThreadingHTTPServer):
    """Repositories by id: file name -> bytes. cuts: files whose first download breaks off half-way. asked: what clients sent."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.card = repositories, {"license": "apache-2.0"}
        self.cuts, self.refused, self.asked = set(), set(), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(is_head=True)

    def do_GET(self):
        self.answer(is_head=False)

    def send(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self, *, is_head):
        hub = self.server
        hub.asked.append((self.command, self.path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^?]+))?(\?.*)?", self.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        model = (api or file).group(1) if api or file else None
        if model in hub.refused:
            return self.send(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="gated")
        if model not in hub.repositories:
            return self.send(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="none")
        files = hub.repositories[model]
        if api:
            commit = {None: COMMIT, "main": COMMIT, "v1": OLD}.get(api.group(2))
            if commit is None:
                return self.send(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="none")
            body = {"id": model, "sha": commit, "tags": [], "cardData": hub.card,
                    "siblings": [{"rfilename": name, "size": len(data)} for name, data in files.items()]}  # fmt: skip
            return self.send(200, json.dumps(body).encode(), Content_Type="application/json")
        data = files.get(file.group(3))
        if data is None:
            return self.send(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="none")
        headers = {"ETag": f'"{sha256(data).hexdigest()}"', "X_Repo_Commit": file.group(2), "Accept_Ranges": "bytes"}
        if is_head:
            self.send_response(200)
            for name, value in {**headers, "Content_Length": len(data)}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            return None
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        if file.group(3) in hub.cuts:
            hub.cuts.remove(file.group(3))
            self.send_response(200)
            for name, value in {**headers, "Content_Length": len(data)}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return None
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.send(206 if start else 200, data[start:], **headers)


@pytest.fixture
def hub():
    files = {path.name: path.read_bytes() for path in demo.BASE.iterdir() if path.is_file()}
    more = {"pytorch_model.bin": b"pickle", "modeling_own.py": b"import os", "README.md": b"x", "other.safetensors": b"y",
            "onnx/model.safetensors": b"z", ".gitattributes": b"", "LICENSE": b"terms"}  # fmt: skip
    style = {path.name: path.read_bytes() for path in demo.ADAPTERS["style"].iterdir()}
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    evil = {"config.json": b"{}", "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()}
    hub = Hub({"someone/demo": files | more, "someone/style": style | more, "someone/pickled": pickled, "someone/evil": evil})
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def trimtab_(hub, tmp_path):
    def run(*arguments, before="pass", **environ):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env = {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1", **environ}
        code = f"import sys; {before}; from trimtab.cli.main import main; sys.exit(main({[str(part) for part in arguments]!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=400)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def test_config_tokenizer_and_the_named_weights_are_fetched_and_nothing_else(hub, trimtab_, tmp_path):
    done = trimtab_("pull", "someone/demo", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    pulled = json.loads(done.stdout)
    expected = {path.name for path in demo.BASE.iterdir()} | {"LICENSE"}
    assert set(pulled["files"]) == expected == {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert (pulled["revision"], pulled["license"]) == (COMMIT, "apache-2.0") and pulled["folder"].endswith(COMMIT)
    assert pulled["bytes"] == pulled["fetched_bytes"] > 0
    fetched = [path for command, path, _ in hub.asked if command == "GET" and "/resolve/" in path]
    assert not [path for path in fetched if path.endswith((".bin", ".py", ".md", "other.safetensors")) or "onnx" in path]
    assert json.loads(trimtab_("pull", "someone/demo", "--json").stdout)["fetched_bytes"] == 0
    listed = trimtab_("models", "--quick", HF_HUB_OFFLINE="1")  # and from now on without the hub
    assert "someone/demo  Gemma4ForConditionalGeneration" in listed.stdout


def test_gguf_files_are_fetched_by_name_with_their_set_or_projector_and_read_from_the_cache(hub, trimtab_, tmp_path):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path / "made")
    parts = [f"Q8/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    whole = [part.read_bytes() for part in gguf_files.split(file, tmp_path)]
    config = {"quantization": {"group_size": 64, "bits": 4}}
    pair, _ = gguf_towers.qwen3vl(pico.built("qwen3_vl"), tmp_path / "pair")
    hub.repositories |= {
        "someone/gguf": {"config.json": b"{}", "one.gguf": file.read_bytes(), **dict(zip(parts, whole, strict=True))},
        "someone/part": {parts[0]: whole[0]}, "someone/seeing": {file.name: file.read_bytes() for file in pair.iterdir()},
        "someone/mlx": {"config.json": json.dumps(config).encode(), "model.safetensors": b"x"},
    }  # fmt: skip
    pulled = (
        "gguf", "gguf/two.gguf", "mlx", f"part/{parts[0]}", f"gguf/{parts[1]}", "seeing/model.gguf", "seeing/mmproj-model.gguf",
    )  # fmt: skip
    commands = [*(["pull", f"someone/{one}"] for one in pulled), ["plan", "someone/seeing", "--device", "cpu"]]
    first = f"from trimtab.cli.main import main; [main(one) for one in {commands}]"
    done = trimtab_("plan", f"someone/gguf/{parts[0]}", "--device", "cpu", "--json", before=first)
    for words in (
        "has GGUF files (Q8/m-00001-of-00002.gguf, one.gguf)", "trimtab pull someone/gguf/Q8/m-00001-of-00002.gguf",
        "has no 'two.gguf'; its GGUF files are", "is packed for MLX,", f"has 1 of the 2 files of {parts[0]!r}",
        "for images, with a projector (mmproj-model.gguf)", "mmproj-model.gguf is a projector",
    ):  # fmt: skip
        assert words in done.stderr
    assert not [path for _, path, _ in hub.asked if "someone/mlx/resolve" in path and "safetensors" in path]
    assert not [path for _, path, _ in hub.asked if "someone/part/resolve" in path]
    assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*/*")} == {part.rpartition("/")[2] for part in parts}
    assert done.returncode == 0 and '"quant": "q8_0"' in done.stdout and "Qwen3VLForConditionalGeneration on cpu" in done.stdout
    listed = trimtab_("models", "--quick", HF_HUB_OFFLINE="1").stdout
    assert "someone/seeing  Qwen3VLForConditionalGeneration" in listed and "f16 (16.00 bits)" in listed


def test_a_download_that_breaks_off_goes_on_where_it_was(hub, trimtab_, tmp_path):
    name = "model-00001-of-00002.safetensors"
    hub.cuts.add(name)
    # It keeps what it has in pieces of 10 MiB, which is more than this model has.
    small = "import huggingface_hub.constants; huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 65536"
    first = trimtab_("pull", "someone/demo", before=small)
    if first.returncode:  # a release of huggingface_hub that does not try again itself
        assert trimtab_("pull", "someone/demo", before=small).returncode == 0
    assert [span for _, path, span in hub.asked if path.endswith(name) and span and span != "bytes=0-"]
    (found,) = (tmp_path / "cache").rglob(f"snapshots/*/{name}")
    assert found.read_bytes() == (demo.BASE / name).read_bytes()


@pytest.mark.slow
def test_run_pulls_once_when_it_is_asked_to_and_never_otherwise(hub, trimtab_):
    question = ["Who are you?", "--device", "cpu", "--context", "64", "--max-new-tokens", "4", "--quant", "none"]
    refused = trimtab_("run", "someone/demo", *question)
    assert refused.returncode == 3 and "trimtab pull someone/demo" in refused.stderr and hub.asked == []
    first = trimtab_("run", "someone/demo", "--pull", *question)
    assert first.returncode == 0 and first.stdout.strip(), first.stderr
    assert "license: apache-2.0" in first.stderr
    count = len(hub.asked)
    assert trimtab_("run", "someone/demo", "--pull", *question).stdout == first.stdout
    assert len(hub.asked) == count  # what is there is not looked up again


def test_a_revision_is_a_folder_of_its_own(hub, trimtab_, tmp_path):
    pulled = json.loads(trimtab_("pull", "someone/style", "--revision", "v1", "--json").stdout)
    assert pulled["revision"] == OLD and set(pulled["files"]) == {"adapter_config.json", "adapter_model.safetensors", "LICENSE"}
    refs = tmp_path / "cache" / "models--someone--style" / "refs"
    assert (refs / "v1").read_text() == OLD and not (refs / "main").exists()


def test_what_cannot_be_pulled_is_named(hub, trimtab_, tmp_path):
    hub.refused.add("someone/gated")
    wrong = [
        (["someone/none"], 2, "no such model or revision"), (["someone/demo", "--revision", "v9"], 2, "no such model or revision"),
        (["someone/pickled"], 3, "pickles are never fetched"), (["someone/evil"], 3, "not one of its weight files"),
        (["not an id"], 2, "is not a hub id"), (["someone/gated"], 2, "Accept the license"),
    ]  # fmt: skip
    commands = [["pull", *words] for words, *_ in wrong]
    each = f"from trimtab.cli.main import main; [print(main(one), file=sys.stderr) for one in {commands}]"
    said = re.split(r"^(\d)\n", trimtab_("completion", "bash", before=each).stderr, flags=re.M)
    for (words, code, why), told, ended in zip(wrong, said[::2], said[1::2], strict=False):
        assert int(ended) == code and why in told, (words, told)
    assert len(said) == 2 * len(wrong) + 1 and not list(tmp_path.rglob("*.bin"))


def test_a_switched_off_hub_and_a_full_disk_are_named(hub, trimtab_):
    done = trimtab_("pull", "someone/demo", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "HF_HUB_OFFLINE is set" in done.stderr and hub.asked == []
    full = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(total=9, used=8, free=1)"
    done = trimtab_("pull", "someone/demo", before=full)
    assert done.returncode == 2 and "the disk has 1 B free" in done.stderr
    assert not [path for command, path, _ in hub.asked if command == "GET" and "/resolve/" in path]


def test_a_hub_that_is_not_there_is_one_line(trimtab_):
    done = trimtab_("pull", "someone/demo", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_revision_without_a_pull_has_no_effect(capsys):
    assert main.main(["run", "someone/demo", "x", "--revision", "v1"]) == 2
    assert "--revision" in capsys.readouterr().err


def test_serve_pulls_a_revision_names_it_by_its_id_and_rereads_it_without_asking_the_hub(hub, trimtab_):
    served = (  # no server is started: its models are printed, then the hub gets a mark, then the settings are read again
        "import http.client, os; from trimtab.cli.commands import serve; "
        "hub = http.client.HTTPConnection(os.environ['HF_ENDPOINT'][7:]); mark = lambda: hub.request('GET', '/mark'); "
        "serve._serve = lambda models, *_: mark() or hub.getresponse() and print(models, 'AGAIN', *_[-1](), sep='\\n')"
    )
    flags = ["--pull", "--revision", "v1", "--device", "cpu", "--context", "256", "--rows", "2"]
    done = trimtab_("serve", "someone/demo", *flags, before=served)
    first, again, changed, _, waiting = done.stdout.splitlines()
    assert done.returncode == 0 and "ServedModel(name='someone/demo'" in first and f"{OLD}'" in first, done.stdout
    assert (again, changed, waiting) == ("AGAIN", first, "[]")
    assert hub.asked[0][1].startswith("/api/models/someone/demo/revision/v1") and hub.asked[-1][1] == "/mark"
