"""`trimtab chat`: a pipe, a real process on a terminal, and each command of a session."""

import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import trimtab
from tests.raised import raised, refused
from trimtab import adapter_names, demo
from trimtab.cli import main
from trimtab.cli.chat import chat as chat_command
from trimtab.cli.chat import input
from trimtab.cli.chat import session as chat_session
from trimtab.cli.chat.session import Session
from trimtab.cli.flags.output import Style
from trimtab.errors import RequestError

BASE, STYLE = str(demo.BASE), f"style={demo.ADAPTERS['style']}"
PLACED = ["--device", "cpu", "--context", "512", "--adapter", STYLE]
QUESTION = "Who are you?"


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(
        demo.BASE, adapters={"style": str(demo.ADAPTERS["style"])}, context=256, audio_s=2.0, device="cpu", head="full"
    )
    with trimtab.load(plan) as loaded:
        yield loaded


def talked(model, *lines, as_json=False, is_terminal=False, **options):
    """Run a session over lines. Returns its exit code."""
    session = Session(model.chat(max_new_tokens=8, **options), model, as_json=as_json, is_terminal=is_terminal)
    return session.run(input.line_reader(io.StringIO("\n".join(lines) + "\n")))


# Pipes and a terminal -------------------------------------------------------------------------------------------------


@pytest.fixture
def piped(model, monkeypatch, capsys):
    """Return a function that runs `trimtab chat` on a text of a pipe, with the model: its exit code, output and errors."""

    def opened(plan, decode, **_):
        asked = plan.request
        assert (asked.device, asked.context_tokens, asked.adapters, decode) == ("cpu", 512, model.plan.request.adapters, "auto")
        return nullcontext(model)

    monkeypatch.setattr(chat_command, "opened", opened)

    def run(text, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return main.main(["chat", BASE, *PLACED, *options]), *capsys.readouterr()

    return run


def test_lines_of_a_pipe_are_turns(model, piped, tmp_path):
    lines = [QUESTION, "/adapter style", '"""Who', 'are you?"""', f"/save {tmp_path / 'talk.json'}"]
    code, out, err = piped("\n".join(lines) + "\n", "--max-new-tokens", "8", "--use", "base")
    assert code == 0, err
    first = model.answer(QUESTION, max_new_tokens=8).text
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert [message.get("adapter", "-") for message in saved["messages"]] == ["-", None, "-", "style"]
    assert saved["messages"][2]["content"] == "Who\nare you?"
    assert out == "".join(f"{message['content']}\n" for message in saved["messages"][1::2])
    assert saved["messages"][1]["content"] == first


def test_an_error_ends_a_piped_conversation_with_its_code(piped):
    code, out, err = piped("/imgae x\n")
    assert (code, out) == (2, "") and "/image" in err and "Traceback" not in err


class Terminal:
    """A process whose three streams are a terminal of its own."""

    def __init__(self, arguments, environ):
        import fcntl
        import pty
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))

        def own_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimtab", *arguments], stdin=slave, stdout=slave, stderr=slave,
            preexec_fn=own_terminal, env={**os.environ, "TERM": "xterm", **environ},
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self.master, False)
        self.seen = ""

    def wait_for(self, pattern):
        """Read until the pattern is seen; returns what came, without escape sequences, and forgets it."""
        until = time.monotonic() + 200  # a limit for what hangs, on a machine that has other work
        while time.monotonic() < until:
            select.select([self.master], [], [], 1.0)
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except BlockingIOError:
                continue
            except OSError:
                break  # the other side is closed
            # prompt_toolkit asks where the cursor is
            if "\x1b[6n" in self.seen:
                self.seen = self.seen.replace("\x1b[6n", "")
                self.send("\x1b[1;1R")
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r", "", self.seen)
            if re.search(pattern, plain):
                self.seen = ""
                return plain
        raise AssertionError(f"{pattern!r} never came: {self.seen!r}")

    def send(self, text):
        os.write(self.master, text.encode())


@pytest.mark.skipif(sys.platform == "win32", reason="opens a POSIX terminal")
def test_ctrl_c_on_a_terminal_ends_the_answer_and_not_the_program(tmp_path):
    options = [*PLACED, "--temperature", "100", "--seed", "1", "--context", "4096"]
    terminal = Terminal(["chat", BASE, *options], {"XDG_CACHE_HOME": str(tmp_path)})
    try:
        terminal.wait_for("style>")
        stopped = 0
        while stopped < 2:  # a second Ctrl-C of a process would end it at once
            terminal.send(f"{QUESTION}\r")
            # The terminal draws the line twice; before its answer has begun, Ctrl-C would stop no answer.
            terminal.wait_for(r"(?s)you\?\n(?!\s*style>)\s*\S.{40}")
            terminal.send("\x03")
            # An answer of random tokens may have ended by itself before.
            stopped += "stopped" in terminal.wait_for("(?s)(stopped|leaves).*style>")
        terminal.send("\x03")
        assert "/quit or Ctrl-D leaves" in terminal.wait_for("leaves.*\n.*style>")
        terminal.send("/adap\t")
        terminal.wait_for("ter")  # the rest of the word, drawn behind what was typed
        terminal.send(" base\r")
        terminal.wait_for("answers come from base(.*\n)+.*base>")
        terminal.send("/memory\r")
        assert "tokens/s" in terminal.wait_for("(?s)tokens/s.*base>")
        terminal.send("/adapter other\r")
        terminal.wait_for("(?s)no adapter of this name is loaded.*base>")
        terminal.send("\x1b[A\x1b[A\x1b[A\x1b[A")  # the arrow keys bring a line back
        terminal.wait_for("Who are you")
        terminal.send("\x15\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    history = next(tmp_path.rglob("lines"))
    assert QUESTION in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_help_names_every_command_and_the_parser_its_flags(capsys):
    with pytest.raises(SystemExit):
        main.main(["chat", "--help"])
    assert "--no-history" in capsys.readouterr().out
    named = {form.split()[0].removeprefix("/") for form, _ in chat_session.HELP}
    assert named == {*Session(None, None, as_json=False, is_terminal=False)._commands, "quit"}


def test_a_chat_with_the_demo_begins_with_a_question_that_it_can_answer(model, capsys):
    question = adapter_names.KNOWS.partition(": ")[2]
    assert talked(model, question, is_terminal=True) == 0
    out, err = capsys.readouterr()
    assert f"adapters: style\n{adapter_names.KNOWS}\n" in err and out.strip()
    asks = map(json.loads, (demo.FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    assert question in {ask["prompt"] for ask in asks}


# Each command ---------------------------------------------------------------------------------------------------------


def test_a_comparison_names_the_words_that_differ(model, capsys):
    assert talked(model, QUESTION, "/compare base style", "/compare base base Again?") == 0
    out, err = capsys.readouterr()
    base, styled = (model.answer(QUESTION, adapter=name, max_new_tokens=8).text for name in (None, "style"))
    assert out.startswith(f"{base}\n--- base\n{base}\n--- style\n{styled}\n--- base\n")
    assert "differing words: " in err and "base and base give the same answer" in err


def test_media_go_with_the_next_message_alone(model, capsys):
    lines = [f"/image {demo.IMAGES[0]}", f"/audio '{demo.SOUNDS[0]}'", "What is this?", "/clear", "What is this?"]
    assert talked(model, *lines, as_json=True) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sorted(line)[0] for line in said] == ["note", "note", "adapter", "note", "adapter"]
    with_media, without = said[2], said[4]
    assert without["text"] == model.answer("What is this?", max_new_tokens=8).text
    assert with_media["prompt_tokens"] > without["prompt_tokens"]


def test_a_system_message_can_be_set_and_removed(model, capsys):
    assert talked(model, "/system Speak.", QUESTION, "/system off", "/again", as_json=True) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[1]["text"] == model.answer(QUESTION, system="Speak.", max_new_tokens=8).text
    assert said[3]["text"] == model.answer(QUESTION, max_new_tokens=8).text


def test_an_adapter_can_be_loaded_in_a_conversation(model, capsys):
    assert talked(model, f"/adapter more={demo.ADAPTERS['specialist']}", QUESTION, "/reload", "/adapter", "/help") == 0
    out, err = capsys.readouterr()
    assert out == model.answer(QUESTION, adapter="more", max_new_tokens=8).text + "\n"
    assert "* more" in err and "no adapter's files have changed" in err and "Ctrl-C ends an answer" in err
    model.unload_adapter("more")


def test_the_list_of_adapters_marks_the_one_that_answers_also_a_mix(model, capsys):
    assert talked(model, "/adapter", "/adapter style:0.5", "/adapter") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["* base", "  style", "answers come from style:0.5", "  base", "  style", "* style:0.5"]


def test_a_conversation_is_saved_to_be_read(model, tmp_path, capsys):
    path = tmp_path / "talk.md"
    assert talked(model, QUESTION, f"/save {path}", system="Be brief.") == 0
    text = path.read_text()
    assert text.startswith(f"# {demo.BASE}\n\n*System:* Be brief.\n\n**You**\n\n{QUESTION}\n\n**base**\n\n")
    assert refused(talked, model, f"/save {tmp_path / 'none' / 'talk.md'}").field == "/save"


def test_a_file_of_somebody_else_is_replaced_only_on_request(model, tmp_path, capsys):
    path, other = tmp_path / "talk.json", tmp_path / "notes.md"
    other.write_text("mine")
    assert talked(model, QUESTION, f"/save {path}", "/clear", f"/save {path}") == 0  # its own file
    assert json.loads(path.read_text())["messages"] == [] and talked(model, f"/load {path}", QUESTION, f"/save {path}") == 0
    assert len(json.loads(path.read_text())["messages"]) == 2
    for name in (path, other):
        kept = name.read_bytes()
        error = refused(talked, model, f"/save {name}", match="this chat has neither saved nor loaded it")
        assert (error.field, name.read_bytes()) == ("/save", kept)
    assert talked(model, f"/save! {other}") == 0
    assert other.read_text().startswith("# ") and sorted(tmp_path.iterdir()) == [other, path]


def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(model, tmp_path, capsys):
    path = tmp_path / "talk.json"
    assert (
        talked(
            model, f"/image {demo.IMAGES[0]}", f"/audio {demo.SOUNDS[0]}", QUESTION, f"/save {path}", "And now?", system="Be brief."
        )
        == 0
    )
    whole = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert saved["messages"][0] == {
        "role": "user", "content": QUESTION, "images": [str(demo.IMAGES[0])], "audios": [str(demo.SOUNDS[0])]
    }  # fmt: skip
    assert talked(model, f"/load {path}", "And now?") == 0
    out, err = capsys.readouterr()
    assert whole == f"{saved['messages'][1]['content']}\n{out}" and "loaded: 2 messages" in err


@pytest.mark.parametrize(("text", "words"), [
    ("# talk", "is not JSON"), ("{}", "is not a conversation"), ('{"messages": [], "x": 1}', "is not a conversation"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "take turns"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "has no answer"),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', "must be text"),
    ('{"messages": [{"role": "user", "content": "a", "zoo": 1}]}', "unknown key"),
    ('{"messages": [{"role": "user", "content": "a", "images": ["/no/such.png"]}]}', "messages[0]"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}', "an answer has text"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "adapter": 1}]}', "adapter"),
])  # fmt: skip
def test_a_file_that_is_no_saved_conversation_changes_nothing(model, tmp_path, text, words):
    path, chat = tmp_path / "talk.json", model.chat(max_new_tokens=2)
    path.write_text(text)
    chat.send(QUESTION)
    before = list(chat.turns)
    session = Session(chat, model, as_json=False, is_terminal=False)
    with pytest.raises(RequestError, match=re.escape(words)):
        session.run(input.line_reader(io.StringIO(f"/load {path}\n")))
    assert chat.turns == before


@pytest.mark.parametrize(("line", "field"), [
    ("/compare base", "/compare"), ("/compare base none-such", "/compare"), ("/adapter none-such", "/adapter"),
    ("/adapter style:1+none-such:1", "/adapter"), ("/again none-such", "/again"), ("/reload none-such", "/reload"),
    ("/image", "/image"), ("/image no.png", "/image"), ("/audio no.wav", "/audio"), ("/again", "prompt"), ("/x", "/x"),
    ("/clear all", "/clear"),
    ("/quit now", "/quit"), ("/save talk.txt", "/save"), ("/adapter a=/no/such", None),
])  # fmt: skip
def test_a_wrong_command_is_an_error_that_a_terminal_survives(model, line, field, capsys):
    assert getattr(raised(trimtab.TrimtabError, talked, model, line), "field", None) == field
    assert talked(model, line, QUESTION, is_terminal=True) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "trimtab: " in err and "/save=" not in err
    assert not (field or "").startswith("/") or f"trimtab: {field}" in err


def test_a_message_may_begin_with_a_slash_and_an_empty_line_is_none(model, capsys):
    assert talked(model, "", "//etc", as_json=True) == 0
    (said,) = capsys.readouterr().out.splitlines()
    assert json.loads(said)["text"] == model.answer("/etc", max_new_tokens=8).text


def test_spaces_before_a_command_do_not_make_it_a_message(model, capsys):
    assert talked(model, "  /system Be brief. ", " /etc is a folder", as_json=True) == 0
    noted, said = capsys.readouterr().out.splitlines()
    assert json.loads(noted)["note"] == "system message: Be brief."
    assert "text" in json.loads(said)


def test_an_answer_without_text_says_so(model, capsys, monkeypatch):
    ends = model.hf_model.generation_config.eos_token_id
    first = model.answer(QUESTION, max_new_tokens=1).token_ids[0]
    monkeypatch.setattr(model.hf_model.generation_config, "eos_token_id", [first])
    chat = model.chat()
    Session(chat, model, as_json=False, is_terminal=False)._take(QUESTION)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "the answer is empty: the model ended it immediately\n")
    assert chat.turns == [] and ends is not None


def test_a_very_long_line_is_refused_and_the_next_one_read(monkeypatch):
    monkeypatch.setattr(input, "LONGEST_LINE", 10)
    read = input.line_reader(io.StringIO("x" * 35 + "\nshort\n"))
    with pytest.raises(RequestError):
        read("")
    assert read("") == "short"
    with pytest.raises(EOFError):
        read("")


def test_a_quoted_message_of_many_lines_is_read_in_linear_time():
    count = 150_000
    read = input.line_reader(io.StringIO('"""first\n' + "x\n" * count + 'last""" end\nnext\n'))
    begun = time.process_time()
    assert read("") == "first\n" + "x\n" * count + "last end"
    assert time.process_time() - begun < 10  # about 0.1 s; it took 20 s where each line searched the whole text again
    assert read("") == "next"


def test_no_line_of_a_quoted_message_that_is_too_long_is_taken_for_another_message(monkeypatch):
    monkeypatch.setattr(input, "LONGEST_LINE", 10)
    read = input.line_reader(io.StringIO('"""one\ntwo\nthree\nfour\nfive"""\nnext\n"""7\n9"""\n'))
    with pytest.raises(RequestError):
        read("")
    assert (read(""), read("")) == ("next", "7\n9")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_of_other_bytes_than_utf8_is_named(errors):
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe hi\n"), encoding="utf-8", errors=errors)
    error = refused(lambda: input.line_reader(stream)(""))
    assert (error.field, error.reason) == ("prompt", "is not UTF-8 text")


# Terminal -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "words", "has_files"), [
    ("/co", {"/compare", "/quit"}, False), ("/adapter ", {"style", "base"}, False), ("/compare style b", {"style", "base"}, False),
    ("/compare a b c", set(), False), ("/image x", set(), True), ("/adapter new=x", {"base"}, True), ("hello", set(), False),
])  # fmt: skip
def test_what_may_stand_at_the_end_of_a_line(line, words, has_files):
    session = Session(None, SimpleNamespace(adapters=("style",)), as_json=False, is_terminal=True)
    completed, files = session.completions(line)
    assert words <= set(completed) and files == has_files and bool(words) == bool(completed)


def test_keys_send_break_lines_and_leave():
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys:
        read = input.terminal_reader(lambda line: ([], False), keep_history=False, source=keys, output=DummyOutput())
        keys.send_text("one\x1b\rtwo\r")
        assert read("> ") == "one\ntwo"
        keys.send_text('"""one\rtwo""" three\r')
        assert read("> ") == "one\ntwo three"
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            read("> ")
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            read("> ")


def test_a_missing_line_editor_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert input.terminal_reader(lambda line: ([], False), keep_history=False)("> ") == "hello"
    out, err = capsys.readouterr()
    assert out == "> " and err.startswith("prompt_toolkit cannot be imported")


def test_the_history_keeps_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(input, "HISTORY_LINES", 3)
    path = input._history_file()
    path.write_text("".join(f"\n# 2026-01-01 00:00:0{n}\n+line {n}\n" for n in range(6)))
    input._history_file()
    from prompt_toolkit.history import FileHistory

    assert list(FileHistory(str(path)).load_history_strings()) == ["line 5", "line 4", "line 3"]


def test_control_characters_of_a_model_never_reach_a_terminal():
    text = "a\x1b]0;title\x07b\x9bc\r\nd\te\n"
    assert Style(True).printable(text) == "a\ufffd]0;title\ufffdb\ufffdc\nd\te\n" and Style(False).printable(text) == text
