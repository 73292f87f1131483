"""How does a command line become one library call, and its result or error what is printed?"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import trimtab
from trimtab.adapter_names import without_demo_name
from trimtab.checkpoint.names import near_names
from trimtab.cli.flags import output
from trimtab.cli.flags.flags import Number, give_model, group_of
from trimtab.cli.flags.output import COLORS, print_error, print_json, use_color
from trimtab.cli.flags.wording import Words
from trimtab.errors import AdapterError, CheckpointError, DoesNotFitError, RequestError, TrimtabError, choices_text, public_fields
from trimtab.process import before_torch, interrupts
from trimtab.process.exit_codes import EXIT_TEXT_COLUMN, exit_code, exit_codes_text
from trimtab.process.packages import versions_of

# File -> its commands, in the order of --help.
FILES = {
    "commands.plan_run": ("plan", "inspect", "run", "demo"), "chat.chat": ("chat",),
    "commands.models": ("models", "adapters", "completion"), "flags.pull": ("pull",),
    "commands.merge_verify": ("merge", "verify"), "commands.bench": ("bench",), "commands.tune": ("tune",),
    "commands.doctor": ("doctor",), "commands.serve": ("serve",),
}  # fmt: skip
# Commands that compute nothing, and long-running commands, for which the present load of the machine does not matter.
WITHOUT_THREADS, LASTING = ("plan", "inspect", "models", "adapters", "completion", "pull"), ("serve",)
# Commands that end the time without garbage collection themselves, once all is imported.
IMPORTING = ("plan", "run", "chat", "merge", "verify")
# Errors of a full disk, also for standard output.
FULL_DISK = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
# Errors of a file or folder that this process may not use.
REFUSED = tuple(
    getattr(errno, name) for name in
    ("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "ENAMETOOLONG", "EIO", "ESTALE", "EMFILE", "ENFILE")
    if hasattr(errno, name)
)  # fmt: skip
JSON_HELP = {"": "print one JSON object and nothing else", "chat": "print each answer as one line of JSON"}
NO_WORDS = Words()
_FLAG = re.compile("-+[^-.0-9]")
HELP = {"-h", "--help"}
# The end of the message that positional arguments are missing.
_MODELS = "; demo is the bundled model, and `trimtab models` lists those of the local cache"
REQUIRED = {
    "PROMPT": "; - reads standard input, --prompt-file and --prompts read files, and `trimtab chat MODEL` holds a conversation",
    "MODEL": _MODELS, "MODEL, PROMPT": f"{_MODELS}; `trimtab chat MODEL` holds a conversation",
}  # fmt: skip
_TO_PULL = "; it is a hub id, such as google/gemma-4-E4B-it"
# The code of a command line that asks nothing, as of one that cannot be read.
USAGE = 2
STOPPED, READER_GONE = interrupts.STOPPED, 141


class UsageError(RequestError):
    """The command line cannot be parsed; `usage` shows its form."""

    def __init__(self, message: str, *, usage: str) -> None:
        self.usage = usage
        super().__init__(message, field="command line")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help in the columns of the terminal. Examples stay whole, to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            hang = EXIT_TEXT_COLUMN if line.startswith(" ") else 0
            pieces = [line[hang:]] if line.startswith("  trimtab ") else self._split_lines(line[hang:], width - hang)
            lines.append(line[:hang] + f"\n{' ' * hang}".join(pieces))
        return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options. Errors: UsageError of the command that was named, for words that it does not take."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(options, "parser", self)
            given = sys.argv[1:] if args is None else args
            unknown = _with_values(unknown, given)
            meant = unknown_flags(unknown, command, given)
            command.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {meant}" if meant else ""))
        return options

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except RequestError as exc:
            raise argparse.ArgumentError(action, f"{exc.value!r} {exc.reason}") from exc
        except argparse.ArgumentError as exc:
            if action.type not in (int, Number):
                raise
            kind = "a whole number" if action.type is int else "a number"
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {kind}") from exc

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").partition(":")[0]
            choices = next((one.choices for one in self._actions if flag in one.option_strings and one.choices), ())
            message += f" of {', '.join(map(str, choices))}" if choices else ""
        missing = next((text for end, text in REQUIRED.items() if message.endswith(f"required: {end}")), "")
        message += _TO_PULL if missing and self.prog.endswith(" pull") else missing
        raise UsageError(message, usage=self._form())

    def _form(self) -> str:
        """Return the form of the command in one line: 20 lines of flags would hide the message."""
        words = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        return " ".join(["usage:", self.prog, *words, "[options]"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of one command. arguments: without the program's name; None takes the process's own. Only the files of
    `cli/` print; only this one exits. Errors go to stderr; with --json to stdout, as one object."""
    code = 1
    try:
        code = _main(arguments)
        return code
    finally:
        if interrupts.is_command():
            gc.freeze()  # garbage collection at exit walks all modules: more than a second
            with suppress(OSError, ValueError):  # the reader has closed the pipe; it does not need the lost output
                sys.stdout.flush()
            interrupts.end_at_once()
            if code == STOPPED:
                interrupts.leave_stopped(interrupts.stopped_code())


def _color_behind_command(given: list[str]) -> list[str]:
    """Return the arguments with a --color before the command moved after it, where each command has the flag."""
    if given[:1] == ["--color"] and not {*given[1:2]} & {*COLORS}:
        raise UsageError(f"argument --color: expected one argument of {', '.join(COLORS)}", usage="usage: trimtab COMMAND ...")
    count = 2 if given[:1] == ["--color"] else int(bool(given) and given[0].startswith("--color="))
    color, rest = given[:count], given[count:]
    return [rest[0], *color, *rest[1:]] if color and rest and not rest[0].startswith("-") else given


def _as_flags(given: list[str]) -> list[str]:
    """Return the arguments with `help` and `version`, which many programs have as commands, as the flags that they are here."""
    first = given[0] if given else ""
    if first == "help":
        named = [word for word in given[1:2] if not word.startswith("-")]
        return [*named, "--help", *given[1 + len(named) :]]
    return ["--version", *given[1:]] if first in ("version", "-V") else given


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    _prepare_terminal()
    words = Words()
    try:
        given = _as_flags(_color_behind_command(given))
        _check_readable(given)
        if set(given) == {"--version", "--json"}:
            print_json(versions())
            return 0
        if not given:
            parser().print_help(sys.stderr)
            return USAGE
        check_command(given[0])
        is_shown = not as_json and HELP.isdisjoint(given) and sys.stderr is not None and sys.stderr.isatty()
        with output.shown(given[0]) if is_shown else nullcontext():
            options = parser(given[:1]).parse_args(given)
            words = _words(options)
            give_model(options)
            if options.color:
                use_color(options.color)
            if options.name_of_command not in WITHOUT_THREADS:
                before_torch.use_threads(options.threads, beside_others=options.name_of_command not in LASTING)
            interrupts.raise_again()
            interrupts.raise_at_end()
            with before_torch.collecting_rarely(options.name_of_command in IMPORTING and interrupts.is_command()):
                code = int(options.command(options))
        print(end="", flush=True)  # a disk that is full is known here, not at exit
        return code
    except TrimtabError as exc:
        if interrupts.was_raised():
            _print_error(KeyboardInterrupt(), as_json, words)
            return STOPPED
        _print_error(words.named(exc), as_json, words)
        return exit_code(exc)
    except KeyboardInterrupt as exc:
        interrupts.end_at_once()
        _print_error(exc, as_json, words)
        return STOPPED
    except BrokenPipeError:
        _close_output()
        return READER_GONE
    except OSError as exc:
        if exc.errno in REFUSED or (exc.errno is None and "temporary" in str(exc)):
            return _refused(exc, as_json, words)
        if exc.errno not in FULL_DISK:
            raise
        _close_output()
        print_error(f"cannot be written ({exc.strerror})")
        return exit_code(RequestError("cannot be written", field="output"))


def _words(options: argparse.Namespace) -> Words:
    """Return the names of arguments for errors of a command, whose --config file may have set some."""
    if getattr(options, "config", None) is None:
        return Words(options)
    from trimtab.serve.config_file import keys_of

    return Words(options, keys_of(options))


def _refused(exc: OSError, as_json: bool, words: Words) -> int:
    """Report a file that this process may not use, from any step. Returns the exit code."""
    name = exc.filename if isinstance(exc.filename, str) else os.fsdecode(exc.filename or b"")
    error = RequestError(f"cannot be read or written ({exc.strerror or exc})", field="file", value=name or None)
    _print_error(error, as_json, words)
    return exit_code(error)


def _close_output() -> None:
    """Discard the buffer of stdout: the interpreter flushes it again at exit, which must not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_terminal() -> None:
    """Print a question mark for characters that a terminal cannot show, and hide notes of other packages around the answer."""
    import logging
    import warnings

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _print_error(exc: BaseException, as_json: bool, words: Words) -> None:
    if as_json:
        options = {"options": exc.options} if isinstance(exc, DoesNotFitError) and exc.options else {}
        print_json({"error": error_json(exc, words), **options})
    elif isinstance(exc, UsageError):
        print_error(str(exc), before=exc.usage)
    else:
        print_error(_text(exc, words))


def _text(exc: BaseException, words: Words) -> str:
    text = str(exc).replace("(`problems` has all)", "(--json has all)") if isinstance(exc, AdapterError) else str(exc)
    if isinstance(exc, CheckpointError) and exc.path.endswith(".toml"):
        return text  # the message names the keys of that file
    return words.of(text, getattr(exc, "field", None)) or "stopped"


def _check_readable(given: Sequence[str]) -> None:
    """Raise RequestError for an argument that is not UTF-8 and names no file: no tokenizer can read it."""
    for word in given:
        if any("\udc80" <= letter <= "\udcff" for letter in word) and not os.path.lexists(word.rpartition("=")[2]):
            raise RequestError("is not UTF-8 text", field="command line", value=ascii(word).strip("'"))


def error_json(exc: BaseException, words: Words = NO_WORDS) -> dict[str, Any]:
    """Return an error as class, message and the fields that code reads. words: of the command, for the message."""
    kind = RequestError if isinstance(exc, UsageError) else type(exc)
    shown_apart = ("usage", "options")
    fields = {name: value for name, value in public_fields(exc).items() if name not in shown_apart}
    if fields.get("hint"):
        fields["hint"] = words.of(fields["hint"], None)
    return {"class": kind.__name__, "message": _text(exc, words), "fields": fields}


PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "tokenizers", "huggingface-hub")


def versions() -> dict[str, str | None]:
    """Return package -> installed release, None for a missing one. Nothing is imported."""
    own = {"trimtab": trimtab.__version__, "python": platform.python_version()}
    return {**own, **dict.fromkeys(PACKAGES), **versions_of(PACKAGES)}


# Flags ----------------------------------------------------------------------------------------------------------------


def check_command(word: str) -> None:
    """Raise UsageError for a first word that is neither a command nor a flag."""
    commands = [name for names in FILES.values() for name in names]
    if not word.startswith("-") and word not in commands:
        raise UsageError(
            f"{unknown_command(word, commands)}. `trimtab --help` says what each does", usage="usage: trimtab COMMAND ...",
        )  # fmt: skip


def parser(named: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of every command; a command is the function in `command`.

    named: the first word of a command line. If it is a command, no other command's file is imported, nor its imports.
    """
    wanted = [file for file, names in FILES.items() if set(named) & {*names} - {"completion"}]  # it lists every command
    top = _Parser(
        prog="trimtab", allow_abbrev=False,
        description="Run a quantized multimodal model with LoRA adapters on a GPU that it does not fit.",
        epilog=None if wanted else exit_codes_text(), formatter_class=_Help,
    )  # fmt: skip
    top.add_argument(
        "-V", "--version", action="version", version=f"trimtab {trimtab.__version__}",
        help="print the version; with --json also those of other packages",
    )  # fmt: skip
    commands = top.add_subparsers(dest="name", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=examples_text(name), allow_abbrev=False,
            formatter_class=_Help,
        )  # fmt: skip
        made.set_defaults(command=function, parser=made, name_of_command=name)
        return made

    for file in wanted or FILES:
        importlib.import_module(f"trimtab.cli.{file}").add(command)
    for name, each in commands.choices.items():
        output = group_of(each, "output")
        output.add_argument("--json", action="store_true", help=JSON_HELP.get(name, JSON_HELP[""]))
        output.add_argument("--color", choices=COLORS, metavar="WHEN", help=f"{', '.join(COLORS)} (default: auto)")
    if "completion" in commands.choices:
        commands.choices["completion"].set_defaults(top=top)
    for name, each in commands.choices.items():
        if name not in WITHOUT_THREADS:
            group_of(each, "execution").add_argument(
                "--threads", metavar="N", help=f"CPU threads (default: {before_torch.VARIABLE}, or the number of free cores)",
            )  # fmt: skip
    return top


_MODEL = "google/gemma-4-E4B-it"
_ADAPTER = "--adapter medical=PATH"
_DEMO = "demo --adapter demo/style"
EXAMPLES = {
    "plan": (f"{_MODEL} --gpu-memory 4GiB", f'{_MODEL} {_ADAPTER} --card "RTX 4060 8GB"', f"{_MODEL} --save plan.json"),
    "run": (
        f'{_MODEL} "Why is the sky blue?"', f'{_MODEL} {_ADAPTER} --image x.png "What is it?"',
        '--plan plan.json "Why is the sky blue?"', f"{_MODEL} --prompts questions.jsonl --out answers.jsonl",
    ),
    "chat": (f"{_MODEL} {_ADAPTER} --gpu-memory 4GiB", "--plan plan.json", _DEMO),
    "inspect": (f"adapters/medical --model {_MODEL}",),
    "models": ("", "checkpoints --quick"),
    "adapters": (f"adapters --model {_MODEL}",),
    "pull": (_MODEL,),
    "completion": ("bash",),
    "merge": (
        f"{_MODEL} merged {_ADAPTER} --check", f"{_MODEL} merged --adapter style=PATH:0.7",
        f"{_MODEL} packed {_ADAPTER} --requantize nf4-dq",
    ),
    "verify": (
        f"{_MODEL} {_ADAPTER} --against stock", f"{_MODEL} {_ADAPTER} --against merged/",
        f"{_MODEL} {_ADAPTER} --against http://localhost:8000/v1",
    ),
    "bench": (f"{_MODEL} {_ADAPTER} --save bench.json",),
    "tune": (_MODEL,),
    "doctor": ("", "--trace error.txt", f"{_MODEL} {_ADAPTER} --device-map map.json", "--matrix --save runs.json"),
    "serve": (
        f"{_MODEL} {_ADAPTER} --gpu-memory 6GiB", "models.toml --together 1", "--config serve.toml", _DEMO,
    ),
    "demo": ("",),
}  # fmt: skip


def examples_text(command: str) -> str:
    """Return the examples of one command, for --help."""
    lines = [f"  trimtab {command} {words}".rstrip() for words in EXAMPLES[command]]
    return "\n".join(["examples:", *lines, "", "`trimtab --help` lists the exit codes of all commands."])


# Flags of other programs -> what says the same here, the first that a command has: flags, or a positional argument.
# Source: --help of llama.cpp (llama-cli), vLLM (serve), mlx-lm (generate), and arguments of transformers.
ELSEWHERE = {
    **dict.fromkeys(("-p", "--message"), "PROMPT"), **dict.fromkeys(("-m", "--model-path", "--base-model"), "MODEL"),
    **dict.fromkeys(("-c", "--ctx-size", "--n-ctx", "--max-model-len", "--max-seq-len"), "--context"),
    **dict.fromkeys(("-n", "--n-predict", "--max-tokens", "--max-length"), "--max-new-tokens --new-tokens"),
    **dict.fromkeys(("--adapters", "--lora", "--lora-modules", "--lora-path", "--adapter-path", "--enable-lora"), "--adapter"),
    **dict.fromkeys(("--gpu-memory-utilization", "--vram", "--n-gpu-layers", "-ngl", "--cpu-offload-gb"), "--gpu-memory"),
    **dict.fromkeys(("--quantization", "--load-in-4bit", "--load-in-8bit"), "--quant"),
    **dict.fromkeys(("-o", "--output", "--output-dir", "--out-dir"), "--out OUT --save"), "--html": "--save",
    **dict.fromkeys(("--kv-cache", "--kv-cache-dtype", "--cache-type-k", "-ctk"), "--kv"),
    **dict.fromkeys(("--server", "--url", "--base-url", "--api-base"), "--against"), "--torch-dtype": "--dtype",
    "--temp": "--temperature", "-t": "--threads", "-s": "--seed",
}  # fmt: skip


def _with_values(unknown: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return words that a command does not take, a value next to its flag: an argument took it, and left another word over."""
    shown: list[int] = []  # positions in `given`
    for word in unknown:
        start = shown[-1] + 1 if shown else 0
        if word not in given[start:]:
            return list(unknown)
        shown.append(given.index(word, start))
    flags = [at for at in shown if _FLAG.match(given[at]) and "=" not in given[at]]
    values = [at + 1 for at in flags if at + 1 < len(given) and not _FLAG.match(given[at + 1])]
    for value in values:
        others = [at for at in shown if at > value and at not in values and not _FLAG.match(given[at])]
        if value not in shown and others:
            shown[shown.index(others[-1])] = value
    return [given[at] for at in sorted(shown)]


def unknown_flags(unknown: Sequence[str], command: argparse.ArgumentParser, given: Sequence[str]) -> str:
    """Return the message for words that a command does not take: for each flag, the probable intended one. given: all words."""
    options = [text for action in command._actions for text in action.option_strings]
    positional = [str(action.metavar) for action in command._actions if not action.option_strings]
    texts = []
    for before, word in zip(("", *unknown), unknown, strict=False):
        if not _FLAG.match(word):
            texts += [] if _FLAG.match(before) else [_stray(word, command, given, positional)]
            continue
        flag = word.partition("=")[0]
        near, ours = _near(flag, options, positional), ELSEWHERE.get(flag.lower().replace("_", "-"), "").split()
        if near and near[0] in positional:
            texts.append(f"{near[0]} has no flag: {command.prog} {' '.join(positional)}")
        elif not {*near[:1]} & {*ours} and (others := _commands_with(meant := ours[0] if ours else flag)):
            is_called = f" is {meant} here," if ours else " is"
            texts.append(f"{flag}{is_called} a flag of trimtab {', '.join(others)}, not of {command.prog}")
        elif near:
            texts.append(flag + choices_text((), near))
        else:
            texts.append(f"{flag} (`{command.prog} --help` lists the flags)")
    return "; ".join(dict.fromkeys(texts))


def _stray(word: str, command: argparse.ArgumentParser, given: Sequence[str], positional: Sequence[str]) -> str:
    """Return what to do with a word that no argument takes."""
    ours, at = command._option_string_actions, max((at for at, one in enumerate(given) if one == word), default=0)
    before = next((one.partition("=")[0] for one in reversed(given[:at]) if _FLAG.match(one)), "")
    folder = without_demo_name(word.partition("=")[2] or word)
    is_adapter = ("=" in word and before == "--adapter") or os.path.isfile(os.path.join(folder, "adapter_config.json"))
    if is_adapter and "--adapter" in ours:
        return f"each adapter has its own flag: --adapter {word}"
    if "=" in word and isinstance(ours.get(before), argparse._AppendAction):
        return f"{before} is given once for each: {before} {word}"
    if "PROMPT" in positional:
        return 'the words of a prompt stand between quotes: "..."'
    return f"{command.prog} takes {' '.join(positional) or 'flags alone'}"


def _commands_with(flag: str) -> list[str]:
    """Return the commands that have a flag of this name."""
    commands = [one for one in parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return [name for one in commands for name, each in one.choices.items() if flag in each._option_string_actions]


def _near(flag: str, options: Sequence[str], positional: Sequence[str]) -> list[str]:
    spelled = flag.lower().replace("_", "-")
    for one in (spelled, spelled.lstrip("-").upper(), *ELSEWHERE.get(spelled, "").split()):
        if one in options or one in positional:
            return [one]
    by_name = {option.lstrip("-").replace("-", "_"): option for option in options}
    return [by_name[name] for name in near_names(spelled.lstrip("-").replace("-", "_"), by_name)]


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return the message for a first word that is no command."""
    known = tuple(commands)
    return f"there is no command {word!r}{choices_text(known, near_names(word, known))}"
