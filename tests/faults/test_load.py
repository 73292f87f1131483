"""The load bench counts what clients got: percentiles, what was cut, rates that arrive whether the server keeps up or not."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from bench import client, load, load_bodies, soak, voices
from tests import waiting
from trimtab.demo.demo import FOLDER

PIECES, PIECE_S = 4, 0.03


class Talker(BaseHTTPRequestHandler):
    """Streams four pieces; `never` streams one and stays silent; `no` is refused; `raw` sends the server's events."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body["model"])
        if body["model"] == "raw":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write("".join(f"data: {event}\n\n" for event in self.server.events).encode())
            return
        if body["model"] == "no":
            self._send(429, "application/json", {"error": {"class": "QueueFullError"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in waiting.dripped(range(1 if body["model"] == "never" else PIECES), PIECE_S):
            self._chunk({"choices": [{"delta": {"content": f"{number} "}, "finish_reason": None}]})
        if body["model"] == "never":
            self.server.over.wait(30)
            return
        self._chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": PIECES}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status, kind, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Talker)
    found.daemon_threads = True
    found.asked, found.over, found.events = [], threading.Event(), []
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.over.set()
    found.shutdown()
    found.server_close()


def address(server):
    return f"127.0.0.1:{server.server_address[1]}"


def test_a_closed_loop_asks_again_as_soon_as_it_is_answered(server):
    row = load.closed(address(server), [{"model": "a"}, {"model": "b"}], clients=3, seconds=1.2).row()
    assert row["requests"] >= 3 and row["errors"] == {} and row["unfinished"] <= 3
    assert row["ttft_ms"]["p50"] >= 1000 * PIECE_S and set(row["between_ms"]) == {"p50", "p90", "p99", "max"}
    assert {"a", "b"} <= set(server.asked)
    # Three clients, each with a token every 30 ms at best.
    assert 0 < row["tok_s"] <= 3 / PIECE_S


def test_the_beginning_of_a_cell_is_not_counted():
    cell = load.Cell(4.0, 1.0)
    early = client.Asked("complete", ttft_s=0.2, gaps_s=[0.5, 0.5, 0.5], total_s=1.7, completion_tokens=8)
    late = client.Asked("complete", ttft_s=0.4, gaps_s=[0.5], total_s=0.9, completion_tokens=2)
    cut = client.Asked("left", ttft_s=0.3, gaps_s=[0.25], total_s=0.6)
    cell.asked += [(0.0, early), (2.0, late)]
    cell.cut += [(3.4, cut)]
    row = cell.row()
    # Two of the first answer's four pieces, of two tokens each, came after the first second.
    assert row["tok_s"] == pytest.approx((2 * 2 + 2 + 2) / 3.0, abs=0.05)
    assert (row["requests"], row["unfinished"]) == (2, 1) and row["ttft_ms"]["max"] == 400.0
    text = load.table([{"engine": "trimtab", "loop": "closed", "clients": 2, **row}])
    assert "2 clients" in text and "400.0" in text


def test_texts_have_a_number_of_words_and_no_two_are_the_same(tmp_path):
    folder = FOLDER / "base"
    words = load_bodies.words_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = load_bodies.texts(words, ["a"], count=1, tokens=64, max_tokens=5)[0]["messages"][0]["content"][0]["text"]
    turns = [{"role": "user", "content": text}]
    assert len(words) > 100 and len(tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]) == 64
    bodies = load_bodies.mixed(words, ["a", "b"], count=8, tokens=64, max_tokens=5)
    kinds = [[part["type"] for part in body["messages"][0]["content"]] for body in bodies]
    assert kinds.count(["text"]) == 4 and kinds.count(["image_url", "text"]) == 2 and kinds.count(["text", "input_audio"]) == 2
    texts = [body["messages"][0]["content"][0]["text"] for body in bodies if len(body["messages"][0]["content"]) == 1]
    assert len(set(texts)) == 4 and all(len(text.split()) == 64 - load_bodies.TEMPLATE_TOKENS for text in texts)
    assert [body["model"] for body in bodies[:3]] == ["a", "b", "a"]


def test_what_is_unanswered_at_the_end_is_cut_and_counted(server):
    start = time.monotonic()
    row = load.closed(address(server), [{"model": "never"}], clients=2, seconds=0.4).row()
    assert time.monotonic() - start < 30
    assert (row["requests"], row["unfinished"], row["between_ms"]) == (0, 2, None)
    assert row["tok_s"] == pytest.approx(2 / 0.4, rel=0.01)


def test_errors_are_counted_by_name(server):
    row = load.closed(address(server), [{"model": "no"}], clients=1, seconds=0.2).row()
    assert set(row["errors"]) == {"QueueFullError"} and row["ttft_ms"] is None


def test_an_open_loop_arrives_at_its_rate_whatever_happens(server):
    row = load.opened(address(server), [{"model": "never"}], rate=20.0, seconds=1.0).row()
    assert 8 <= row["unfinished"] <= 36 and row["requests"] == 0


def test_percentiles_are_of_the_values_themselves():
    assert client.percentiles([]) is None
    found = client.percentiles([float(number) for number in range(1, 101)])
    assert found == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 100.0}


def test_growth_compares_the_first_and_the_last_fifth():
    steady = [100 * 2**20] * 50
    assert soak.growth(steady)["percent"] == 0
    assert soak.growth([*steady, *[102 * 2**20] * 50])["percent"] == pytest.approx(2.0)
    # One large value in between is no growth.
    assert soak.growth([*steady[:25], 400 * 2**20, *steady])["percent"] == 0


def test_every_adapter_gets_text_pictures_and_sounds():
    bodies = load.questions(load.demo(), 8)
    assert len(bodies) == 3 * 3
    kinds = [{part["type"] for part in body["messages"][0]["content"]} - {"text"} for body in bodies]
    assert {frozenset(kind) for kind in kinds} == {frozenset(), frozenset({"image_url"}), frozenset({"input_audio"})}
    assert {body["model"] for body in bodies} == {"demo", *load.STOCK_ADAPTERS}


def test_a_random_checkpoint_gets_a_word_for_every_token(tmp_path):
    from transformers import AutoTokenizer

    config = json.loads((FOLDER / "base" / "config.json").read_text())
    config["text_config"]["vocab_size"] = 5000
    config["image_token_id"] = 258_880
    (tmp_path / "config.json").write_text(json.dumps(config))
    voices.give(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 5000 and tokenizer.decode([4321]).strip() == "w4321"
    given = json.loads((tmp_path / "config.json").read_text())
    assert given["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image|>")


def test_a_random_checkpoint_that_only_reads_gets_the_turns_of_its_family(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 5000}))
    voices.give(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "What is red?"}]}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokenizer) == 5000 and tokenizer.decode(ids) == text
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] is not None


def test_an_error_that_is_a_text_and_a_stream_that_ends_without_done_are_read(server):
    server.events = ['{"error": "no numbers"}']
    assert client.ask(address(server), {"model": "raw"}).error == "no numbers"
    server.events = [
        '{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}',
        '{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
        '{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": {"prompt_tokens": 3,'
        ' "completion_tokens": 2}}',
    ]
    found = client.ask(address(server), {"model": "raw"})
    assert (found.ended, found.text, found.completion_tokens) == ("complete", "a", 2)


@pytest.mark.slow
def test_both_servers_are_measured_in_one_run(tmp_path):
    file = tmp_path / "load.json"
    load.main(["--seconds", "3", "--clients", "1", "4", "--rates", "2", "--save", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["engine"], row["loop"]) for row in rows] == [
        (engine, loop) for loop in ("closed", "closed", "open") for engine in ("trimtab", "stock")
    ]
    assert all(row["errors"] == {} and row["tok_s"] > 0 for row in rows)


def test_a_size_needs_a_place_to_be_made_in(capsys):
    with pytest.raises(SystemExit):
        load.main(["--size", "e4b"])
    assert "--work" in capsys.readouterr().err


def test_an_engine_that_fails_is_written_down(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no such server")

    monkeypatch.setattr(load, "servers", lambda model, given: {"trimtab": broken, "stock": broken})
    with pytest.raises(SystemExit):  # nothing was measured
        load.main(["--save", str(tmp_path / "load.json")])
    rows = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert [row["failed"] for row in rows] == ["RuntimeError: no such server"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fallback"), [("qwen3", False), ("demo", True)])
def test_transformers_serve_is_measured_beside_it(family, fallback, tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    if family == "demo":
        pytest.importorskip("torchvision")  # of Gemma 4's video processor
        model = load.demo()
    else:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        folder = tmp_path / "made"
        Qwen3ForCausalLM(Qwen3Config(vocab_size=2048, **sizes, **heads)).save_pretrained(folder)
        voices.give(folder)
        model = load.Model(family, folder, {}, 512, 1.0, reads_only=True)
    monkeypatch.setattr(load, "demo", lambda: model)
    file = tmp_path / "load.json"
    given = ["--seconds", "3", "--clients", "2", "--rates", "--others-seconds", "4", "--save", str(file)]
    load.main([*given, "--engines", "trimtab", "transformers", "--max-tokens", "8"])
    rows = {row["engine"]: row for row in json.loads(file.read_text())["rows"]}
    assert not any("failed" in row for row in rows.values())
    assert rows["transformers"]["tok_s"] > 0 and not rows["transformers"]["errors"]
    assert ("does not support continuous batching" in rows["transformers"]["note"]) == fallback
