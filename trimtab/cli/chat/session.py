"""One chat session: a line is a message for the model, or a command if it begins with "/"."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.adapter_names import BASE as DEMO
from trimtab.adapter_names import KNOWS, MIX_FORM, is_mix, parse_mix, without_demo_name
from trimtab.checkpoint.names import near_names
from trimtab.cli.chat import file
from trimtab.cli.chat.input import Reader
from trimtab.cli.flags.flags import BASE, mix_text
from trimtab.cli.flags.opening import end_text
from trimtab.cli.flags.output import Style, apart, has_color, print_error, print_text, set_off
from trimtab.cli.flags.wording import as_typed
from trimtab.errors import RequestError, TrimtabError, gib
from trimtab.printable import printable
from trimtab.process import interrupts
from trimtab.report.document import Document, Facts, Text
from trimtab.report.render import WIDTH, Lines

if TYPE_CHECKING:
    from trimtab.engine.calls.conversation import Conversation
    from trimtab.engine.model import LoadedModel

BASE_NAMES = (BASE, "none")
# Commands that end a chat, and commands that take no text.
LEAVING, ALONE = ("/quit", "/exit", "/bye"), ("clear", "help", "memory")
# What the library's errors call the text behind a command.
ARGUMENTS = ("adapter", "audio", "image", "name")
LEAVE = "/quit or Ctrl-D leaves; /help lists the commands"
HELP = (
    ("/adapter [NAME]", "answer with this adapter from now on, with `base` for none; without a name, list them"),
    (f"/adapter {MIX_FORM}", "answer with a weighted sum of several adapters"),
    ("/adapter NAME=PATH", "load one more adapter and answer with it"),
    ("/reload [NAME]", "reload adapters whose files have changed"),
    ("/compare A B [TEXT]", "answer TEXT, or the last question, with both; the conversation does not change"),
    ("/again [NAME]", "replace the last answer with one by this adapter"), ("/image FILE", "send this image with the next message"),
    ("/audio FILE", "send this audio file with the next message"),
    ("/system [TEXT]", "set the system message, or show it; `/system off` removes it"),
    ("/memory", "planned and used memory, tokens of the context, speed of the last answer"),
    ("/save FILE", "save the conversation as .json for /load, or as .md to read"),
    ("/save! FILE", "the same, and replace a file that exists"),
    ("/load FILE", "continue a saved conversation; adapters do not change"), ("/clear", "forget all turns"),
    ("/help", "list the commands"), ("/quit", "leave, as Ctrl-D does"),
)  # fmt: skip
KEYS = (
    "Enter sends a message, Alt-Enter starts a new line. Ctrl-C ends an answer; the partial answer is kept. Type two slashes\n"
    'to send a message that begins with one: //etc. """ ... """ encloses several lines. Without a terminal each line is a message.'
)


class Session:
    """A conversation on a terminal, or over plain lines. completions: of the line that is being typed (`input.py`)."""

    def __init__(self, chat: Conversation, model: LoadedModel, *, as_json: bool, is_terminal: bool) -> None:
        self.chat, self.model = chat, model
        self.as_json, self.is_terminal = as_json, is_terminal
        self.style = Style(is_terminal, has_color(sys.stdout) and not as_json)
        self._images: list[str] = []
        self._audios: list[str] = []
        self._own_files: set[Path] = set()  # saved or loaded by this chat
        self._commands: dict[str, Callable[[str], None]] = {
            "adapter": self._adapter, "again": self._again, "audio": self._audio, "clear": self._clear,
            "compare": self._compare, "help": self._help, "image": self._image, "memory": self._memory,
            "load": self._load, "reload": self._reload, "save": self._save, "save!": self._save_over,
            "system": self._system,
        }  # fmt: skip

    def run(self, read: Reader) -> int:
        """Answer until the end of the input. Returns the exit code. Errors: TrimtabError if the user cannot retry."""
        if self.is_terminal:
            model = self.model.plan.request.model
            about = f"{KNOWS}\n" if without_demo_name(model) == str(DEMO) else ""
            self._say(f"{model}, adapters: {', '.join(self.model.adapters) or 'none'}\n{about}{LEAVE}")
        while True:
            try:
                line = read(self._prompt())
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                interrupts.raise_again()
                self._say(LEAVE)
                continue
            except RequestError as exc:
                self._refuse(exc)
                continue
            try:
                if self._leaves(line):
                    return 0
                self._take(line)
            except TrimtabError as exc:
                self._refuse(exc)
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                interrupts.raise_again()
                self._say("\nstopped")

    @staticmethod
    def _leaves(line: str) -> bool:
        """Whether a line ends the chat. Errors: RequestError for a text after the command."""
        name, *rest = line.split(maxsplit=1) or [""]
        if name in LEAVING and rest:
            raise _takes_nothing(name)
        return name in LEAVING

    def completions(self, line: str) -> tuple[list[str], bool]:
        """Return the possible words at the end of a line, and whether a file is possible."""
        words = line.split(" ")
        if len(words) == 1:
            return ([f"/{name}" for name in (*self._commands, "quit")] if line.startswith("/") else []), False
        names = [*self.model.adapters, BASE_NAMES[0]]
        known = {"/adapter": 2, "/again": 2, "/compare": 3, "/reload": 2}
        has_names = len(words) <= known.get(words[0], 0)
        is_path = words[0] in ("/image", "/audio", "/save", "/save!", "/load") or (words[0] == "/adapter" and "=" in words[-1])
        return (names if has_names else []), is_path and len(words) == 2

    def _prompt(self) -> str:
        waiting = "".join(f" +{Path(path).name}" for path in (*self._images, *self._audios))
        return f"{mix_text(self.chat.adapter)}{waiting}> "

    def _refuse(self, exc: TrimtabError) -> None:
        if not self.is_terminal:
            raise exc
        print_error(as_typed(str(exc)))

    def _say(self, text: str, **fields: Any) -> None:
        """Print a message that is not an answer: on stderr, so that stdout has answers only, or as one JSON line."""
        if self.as_json:
            print(json.dumps({"note": text, **fields}), flush=True)
        else:
            print_text(text, file=sys.stderr, flush=True)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _take(self, line: str) -> None:
        if not line.strip() and not (self._images or self._audios):
            return
        line = "/help" if line.strip() == "/?" else line
        first = line.split(maxsplit=1)[0] if line.strip() else ""
        if first[:1] == "/" and first[1:] in self._commands:
            line = line.lstrip()  # spaces before a command do not make it a message
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line[1:].partition(" ")
            if name not in self._commands:
                raise RequestError(
                    "no such command", field=f"/{name}", allowed=tuple(f"/{one}" for one in self._commands),
                    near=tuple(f"/{one}" for one in near_names(name, self._commands)),
                    hint="/help lists the commands; a message that begins with a slash begins with two",
                )  # fmt: skip
            if name in ALONE and rest.strip():
                raise _takes_nothing(f"/{name}")
            try:
                self._commands[name](rest.strip())
            except RequestError as exc:
                if exc.field not in ARGUMENTS:
                    raise
                raise RequestError(
                    exc.reason, field=f"/{name}", value=exc.value, allowed=exc.allowed, near=exc.near, hint=exc.hint
                ) from exc
            return
        before = self.chat.left_out
        pieces = self.chat.stream(line.removeprefix("/") if line.startswith("//") else line,
                                  image=self._images, audio=self._audios)  # fmt: skip
        self._images, self._audios = [], []
        self._show(pieces, self.chat.adapter)
        if self.chat.left_out > before:
            self._say(f"the context is full: the oldest {self.chat.left_out} messages are no longer part of the prompt")

    def _show(self, pieces: Iterator[str], adapter: Any) -> str:
        """Print an answer as it is generated. Returns its text."""
        texts: list[str] = []
        try:
            with closing(pieces) as chunks:  # type: ignore[type-var]
                for piece in chunks:
                    texts.append(piece)
                    if not self.as_json:
                        print(self.style.printable(piece), end="", flush=True)
        finally:
            if not self.as_json and texts:
                print(flush=True)
        text, answer = "".join(texts), self.chat.last
        assert answer is not None
        if self.as_json:
            values = {"text": text, "adapter": adapter, "finish_reason": answer.finish_reason,
                      "prompt_tokens": answer.prompt_tokens, "answer_tokens": len(answer.token_ids),
                      "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s}  # fmt: skip
            print(json.dumps(values), flush=True)
        has_stop_texts = bool(self.chat.options.get("stop"))
        if note := end_text(answer, self.model.context_tokens, has_stop_texts=has_stop_texts):
            if text.strip() and not self.as_json:
                print(set_off(f"[{note}]", "note", sys.stderr), file=sys.stderr, flush=True)
            else:
                self._say(f"[{note}]" if text.strip() else note)
        return text

    # Commands ---------------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        self._say(Lines(WIDTH).show(Document("", [Facts(HELP), Text(KEYS)])))

    def _adapter(self, rest: str) -> None:
        if not rest:
            mix = [self.chat.adapter] if isinstance(self.chat.adapter, Mapping) else []
            names = (None, *self.model.adapters, *mix)
            lines = [f"{'*' if name == self.chat.adapter else ' '} {mix_text(name)}" for name in names]
            self._say("\n".join(lines), adapters=list(self.model.adapters))
            return
        name, equals, path = rest.partition("=")
        if equals:
            self.model.load_adapter(name, path)
        self.chat.adapter = self._named(name)
        self._say(f"answers come from {mix_text(self.chat.adapter)}")

    def _named(self, name: str) -> Any:
        """Return an adapter's name, a mix, None for the base. Errors: RequestError if it is not loaded."""
        if is_mix(name):
            mix = parse_mix(name, field="adapter")
            self.model.mixes.check(mix)
            return mix
        if name in BASE_NAMES and name not in self.model.adapters:
            return None
        if name not in self.model.adapters:
            raise RequestError(
                "no adapter of this name is loaded", field="adapter", value=name,
                allowed=(*self.model.adapters, BASE_NAMES[0]), near=near_names(name, self.model.adapters),
                hint=f"/adapter {name}=PATH loads it",
            )  # fmt: skip
        return name

    def _compare(self, rest: str) -> None:
        words = rest.split(None, 2)
        if len(words) < 2:
            raise RequestError("takes two adapters: /compare A B, or /compare A B TEXT", field="/compare")
        names = [self._named(word) for word in words[:2]]
        question = words[2] if len(words) == 3 else None
        texts = []
        for name in names:
            if not self.as_json:
                print(self.style.bold(printable(f"--- {mix_text(name)}")), flush=True)
            texts.append(self._show(self.chat.beside(question, adapter=name), name))
        shown = [self.style.printable(text) for text in texts]
        self._say(apart(*shown, names=(mix_text(names[0]), mix_text(names[1]))))

    def _again(self, rest: str) -> None:
        adapter = self._named(rest) if rest else self.chat.adapter
        self._show(self.chat.again(adapter=adapter), adapter)

    def _image(self, rest: str) -> None:
        from trimtab.engine.chat.media import read_image

        width, height = read_image(_path(rest, "/image")).size
        self._images.append(_path(rest, "/image"))
        self._say(f"{rest}: {width} x {height}, will be sent with the next message")

    def _audio(self, rest: str) -> None:
        from trimtab.engine.chat.media import SAMPLE_RATE, read_audio

        samples = read_audio(_path(rest, "/audio"))
        self._audios.append(_path(rest, "/audio"))
        self._say(f"{rest}: {len(samples) / SAMPLE_RATE:.1f} s, will be sent with the next message")

    def _system(self, rest: str) -> None:
        if rest:
            self.chat.system = None if rest == "off" else rest
        self._say(f"system message: {self.chat.system or 'none'}")

    def _clear(self, rest: str) -> None:
        self.chat.clear()
        self._images, self._audios = [], []
        self._say("all turns are forgotten")

    def _reload(self, rest: str) -> None:
        names = [rest] if rest else list(self.model.adapters)
        changed = [name for name in names if self.model.reload_adapter(name)]
        self._say(f"reloaded: {', '.join(changed)}" if changed else "no adapter's files have changed")

    def _memory(self, rest: str) -> None:
        used, plan = self.model.memory(), self.model.plan
        lines = []
        if self.model.device.type == "cuda":
            from trimtab.engine.memory_shares import shares_document

            lines.append(Lines(WIDTH).show(shares_document(self.model.memory_shares())))
        lines.append(f"host      {gib(used['host_peak_bytes'])} at peak; planned {gib(plan.host_peak_bytes)}")
        lines.append(f"context   {self.chat.prompt_tokens} of {self.model.context_tokens} tokens")
        lines.append(
            f"adapters  {', '.join(self.model.adapters) or 'none'}; room for {gib(max(self.model.free_adapter_bytes(), 0))}"
        )
        last = self.chat.last
        if last is not None:
            lines.append(
                f"last      {len(last.token_ids)} tokens, {last.tokens_per_s:.1f} tokens/s, the first after {last.ttft_s:.2f} s"
            )
        self._say("\n".join(lines), memory=used)

    def _save(self, rest: str) -> None:
        path = Path(_path(rest, "/save"))
        if path.exists() and path.resolve() not in self._own_files:
            raise RequestError(
                "exists, and this chat has neither saved nor loaded it", field="/save", value=str(path),
                hint="Choose another name, or replace it with /save! FILE",
            )  # fmt: skip
        self._save_over(rest)

    def _save_over(self, rest: str) -> None:
        path = Path(_path(rest, "/save"))
        file.save(self.chat, self.model.plan.request, path)
        self._own_files.add(path.resolve())
        self._say(f"saved: {path}, {len(self.chat.turns)} messages")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        file.load(self.chat, path)
        self._own_files.add(Path(path).resolve())
        self._images, self._audios = [], []
        last = f"; the last answer:\n{self.style.printable(self.chat.turns[-1].text)}" if self.chat.turns else ""
        self._say(f"loaded: {len(self.chat.turns)} messages{last}")


def _path(rest: str, command: str) -> str:
    path = rest.strip()
    if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"":
        path = path[1:-1]
    if not path:
        raise RequestError("takes the name of a file", field=command)
    return str(Path(path).expanduser())


def _takes_nothing(command: str) -> RequestError:
    return RequestError("takes nothing after it", field=command)
