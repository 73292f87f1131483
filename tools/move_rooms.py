"""Moves the package's files into their rooms and mends every mention of them, once and reversibly; refuses a tree with changes.

    python tools/move_rooms.py            moves, and mends imports, dotted names and paths in every tracked text
    python tools/move_rooms.py --back     the way back, of the same table (former_names.py)
    python tools/move_rooms.py --list     old and new names, one a line

A branch that was begun before the move commits `trimtab/former_names.py`, runs this, then `ruff check --fix --select I` and
`ruff format`, and merges afterwards.
"""

from __future__ import annotations

import ast
import importlib.util
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Files that are no modules, and folders of them.
DATA = {
    "plan/cards.json": "planning/values/cards.json",
    "runtime/cuda": "engine/kernels/cuda",
    "doctor/issues/issue.md.j2": "doctor/issues/issue.md.j2",
    "serve/page": "serve/http/page",
}
WIDTH = 132
# Stands for the package's name in what is mended already.
DONE = "\x01"
# What the docstring of each room asks.
QUESTIONS = """
process: How does one process of ours run: its files, threads, signals and children, and what may its texts say?
report: How are the figures and tables of a report drawn?
checkpoint: What do the files of a model say, without its weights and without torch?
adapters: What do the files of an adapter say, and do they fit a model?
planning/values: What is a plan made of: blocks, bytes, budgets, execution?
planning/request: What does a user force: placements, device maps, cards, dtypes?
planning/plan: What is a plan, and how do people see it?
planning/memory: How many bytes are needed besides the weights?
planning: Which placement is the cheapest, and why?
machine: What is this machine, and what did earlier processes learn about it?
engine/cuda: What is asked of CUDA: compiling, configuring, capturing, describing memory?
engine/formats: How is a quantized weight stored, unpacked and multiplied by its own library?
engine/tiers: How do bytes get from disk to host to device ahead of use?
engine/memory: How is device memory besides tensors held: rates, pools, reserve, errors?
engine/lora: What is an adapter on a model, and what is PEFT's arithmetic for it?
engine/layers: Which modules replace Linear and Embedding?
engine/kv: Where are the keys and values of rows: rings, pages, 8 bits, stored prefixes?
engine/kernels: Which kernels are there, are they right on this card, and how are they configured?
engine/batched_lora: How does a kernel find the adapter of each row?
engine/passes: How does a chunk of tokens go through the modules with fixed shapes?
engine/families: Which decoders are known as data, and what is one step of each?
engine/decode: How is one token of every row computed?
engine/towers: How do images and audio go through their encoders?
engine/loader: How does a plan become a model?
engine/templates: How is a foreign chat template rendered within bounds?
engine/chat: How do messages become token ids, and answer tokens become text, reasoning and calls?
engine/prefill: How do prompts become keys and values?
engine/batch: How are rows decoded together, and how are tokens sampled?
engine/calls: Which ways are there to ask a loaded model?
engine: What is a loaded model, the owner of the memory?
merging/changes: Which values does a merge change, and to what?
merging/files: Which files does a merge write them to?
merging: How is a merge made and checked?
bridge: How do stock objects come in and go out?
verification/routes: How are two ways to the same answer run, each in a process?
verification/merges: What did a merge keep?
verification/render: How is a verification reported to people?
verification: Do two routes agree?
verification/server: Does a server apply its adapter?
benchmark: How fast is trimtab beside the stock stack?
doctor/facts: What is known of a bug?
doctor/catalogue: Which bugs of other packages are known, one file each?
doctor/probes: Is a known bug here?
doctor/servers: Which bugs of other servers are known?
doctor/traces: Whose error is this text?
doctor/cases: What does the stock stack answer in every placement?
doctor/issues: What does an issue for another project say, from recorded runs?
doctor/preflight: What would the stock stack do with this model?
doctor/bisect: Which release broke it?
doctor: What does the doctor report?
serve/contract: What does every part of the server share?
serve/observe: Which numbers and traces does the server give?
serve/media: What are the bytes of a request's media?
serve/grammar: How is an answer held to a schema, within bounds?
serve/scheduling: Whose turn is it?
serve/adapters: Which adapters are in host memory?
serve/api: How do requests become jobs, and answers become responses?
serve/worker: What does the process do that owns a model?
serve/http: Who may connect, and where does a request go?
serve: How is the whole server run?
serve/ray: How do copies run on Ray?
cli/flags: What do all commands share: flags, wording, output?
demo: What does the demo bring and show?
cli/chat: How does a chat run in a terminal?
cli/commands: What does each subcommand do?
cli: How is a command line parsed?
"""
# Texts that say what once was.
HISTORY = ("tools/move/", "bench/results/", "trimtab/serve/http/page/vendor", "trimtab/serve/page/vendor", "locks/")
TEXTS = {
    ".py",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".cu",
    ".cuh",
    ".h",
    ".js",
    ".html",
    ".j2",
    ".ipynb",
    ".txt",
    ".service",
    "",
}
# Names of files that other packages have as well: never changed where they stand alone.
COMMON = frozenset(
    """
    __init__ adapter batch chat check cli client clock cost door front generate hf inputs kernels line load lora matrix merge
    model names pack page picture place plan probe process prompts quant read report run schema shapes slots stream style
    tables tiers verify words write
    """.split()  # noqa: SIM905
)


def _moves() -> dict[str, str]:
    """Return the table, without the package around it, which may be half moved; of files that are one now, the first one."""
    spec = importlib.util.spec_from_file_location("former_names", ROOT / "trimtab/former_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    firsts = {new: old for old, new in reversed(module.moves().items())}
    return {old: new for new, old in reversed(firsts.items())}


class Mover:
    """One direction of the table. modules: dotted old -> dotted new, without "trimtab."."""

    def __init__(self, files: dict[str, str], data: dict[str, str]) -> None:
        self.files, self.data = files, data
        self.modules = {_dotted(old): _dotted(new) for old, new in files.items()}
        self.changed = {old: new for old, new in self.modules.items() if old != new}
        # `trimtab.plan` and `trimtab.merge` are functions.
        names = sorted(set(self.changed) - {"plan", "merge", "planning", "merging"}, key=len, reverse=True)
        self.any_module = re.compile(r"\btrimtab\.(" + "|".join(map(re.escape, names)) + r")(?!\w)")
        paths = {f"{old}.py": f"{new}.py" for old, new in files.items() if old != new} | data
        self.paths = dict(
            sorted(((old, new) for old, new in paths.items() if old != new), key=lambda pair: -len(pair[0]))
        )
        joined = "|".join(map(re.escape, self.paths))
        self.any_path = re.compile(rf"(?<![\w.])(trimtab/)?({joined})(?!\w)")
        deep = sorted((old for old in files if "/" in old and files[old] != old), key=len, reverse=True)
        joined = "|".join(map(re.escape, deep))
        self.any_part = re.compile(rf"(?<=[\"'/])({joined})(?=:)|(?<=[\"'])({joined})(?=[\"'])")
        last = [old.rpartition("/")[2] for old in files]
        self.alone = {
            f"{name}.py": f"{files[old].rpartition('/')[2]}.py"
            for old in files
            if last.count(name := old.rpartition("/")[2]) == 1 and name not in COMMON and files[old].rpartition("/")[2] != name
            and not files[old].endswith("__init__")
        }  # fmt: skip
        self.any_alone = (
            re.compile(r"(?<![\w./])(" + "|".join(map(re.escape, self.alone)) + r")(?!\w)") if self.alone else None
        )

    def text(self, text: str) -> str:
        """Mend dotted names and paths."""
        text = re.sub(r"\btrimtab\.(plan|merge)\.\*", lambda hit: f"trimtab.{self.changed[hit[1]]}.*", text)
        text = self.any_module.sub(lambda hit: f"trimtab.{self.changed[hit[1]]}", text)
        # The name of a file of the top level says nothing without the folder: `alone` below looks at those.
        text = self.any_path.sub(
            lambda hit: hit[1] + self.paths[hit[2]] if hit[1] else self.paths[hit[2]] if "/" in hit[2] else hit[0], text
        )
        text = self.any_part.sub(lambda hit: self.files[hit[0]], text)
        return self.any_alone.sub(lambda hit: self.alone[hit[1]], text) if self.any_alone else text

    def python(self, text: str) -> str:
        """Mend `from package import module`, then the rest. A module's name in the file follows if nothing else has the new one."""
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return self.text(text)
        edits, renames = [], {}
        taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(_bound(tree))
        bound = list(_bound(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "trimtab":
                edit = self._imported(node, taken, renames, bound)
                said = re.search(r"# noqa.*", ast.get_source_segment(text, node) or "")
                edit = re.sub(r"(?m)$", f"  {said[0]}", edit) if said and edit else edit
                if edit is not None:
                    edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, edit))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in renames:
                edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, renames[node.id]))
        lines = text.encode().splitlines(keepends=True)  # ast counts bytes
        for first, start, last, end, new in sorted(edits, reverse=True):
            rest = lines[last - 1][end:]
            lines[first - 1 : last] = [lines[first - 1][:start] + new.encode() + rest]
        return self.text(b"".join(lines).decode()).replace(DONE, "trimtab")

    def _imported(self, node: ast.ImportFrom, taken: set[str], renames: dict[str, str], bound: list[str]) -> str | None:
        package = (node.module or "").removeprefix("trimtab").removeprefix(".")
        groups: dict[str, list[str]] = {}
        is_changed = False
        for alias in node.names:
            full = f"{package}.{alias.name}" if package else alias.name
            new = self.changed.get(full)
            if new is None or alias.name == "*":
                target = self.changed.get(package, package)
                groups.setdefault(f"trimtab.{target}" if target else "trimtab", []).append(
                    _alias(alias.name, alias.asname)
                )
                is_changed |= target != package
                continue
            is_changed = True
            room, _, name = new.rpartition(".")
            local = alias.asname or alias.name
            if alias.asname is None and name != alias.name and name not in taken and not keyword.iskeyword(name):
                if bound.count(alias.name) == 1:
                    renames[alias.name] = local = name
                    taken.add(name)
            groups.setdefault(f"trimtab.{room}" if room else "trimtab", []).append(_alias(name, local))
        if not is_changed:
            return None
        indent = " " * node.col_offset
        return f"\n{indent}".join(
            f"from {module.replace('trimtab', DONE, 1)} import ({', '.join(names)})" for module, names in groups.items()
        )


def _alias(name: str, local: str | None) -> str:
    return name if local in (None, name) else f"{name} as {local}"


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a file binds anywhere: imports, assignments, arguments, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        else:
            yield getattr(node, "name", None) or ""  # functions, classes, exceptions, patterns


def _dotted(path: str) -> str:
    return path.replace("/", ".").removesuffix(".__init__") if path != "__init__" else ""


def wrapped(text: str) -> str:
    """Wrap comments and docstrings that longer names have made too long; code is the formatter's."""
    lines = text.split("\n")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    inside = {
        line: node.end_lineno or line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for place in sorted((place for place, line in enumerate(lines) if len(line) > WIDTH), reverse=True):
        line = lines[place]
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith("# "):
            lines[place : place + 1] = _filled(line.strip()[2:], f"{indent}# ")
        elif place + 1 in inside:
            closing = line.rstrip().endswith('"""') and line.strip() != '"""'
            filled = _filled(line.strip().removesuffix('"""') if closing else line.strip(), indent)
            if closing:
                filled[-1] += '"""'
            lines[place : place + 1] = filled
    return "\n".join(lines)


def _filled(text: str, lead: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
    )


def open_rooms(package: Path) -> None:
    """Give each room its question: a docstring alone where there was no `__init__.py`."""
    for line in QUESTIONS.strip().splitlines():
        room, _, question = line.partition(": ")
        file = package / room / "__init__.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else '""""""\n'
        opening = re.match(r'"""(.*?)("""|\n)', text)
        assert opening is not None, file
        file.write_text(f'"""{question}{opening[2]}{text[opening.end() :]}', encoding="utf-8")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    files, data = _moves(), dict(DATA)
    if "--list" in sys.argv[1:]:
        print("\n".join(f"{old}.py {new}.py" for old, new in files.items() if old != new))
        return 0
    if "--back" in sys.argv[1:]:
        files, data = {new: old for old, new in files.items()}, {new: old for old, new in data.items()}
    if git("status", "--porcelain", "--untracked-files=no"):
        print("the tree has changes: commit or put them away first", file=sys.stderr)
        return 1
    base = ROOT / "trimtab"
    here = {old: new for old, new in files.items() if old != new and (base / f"{old}.py").is_file()}
    for old, new in [*((f"{old}.py", f"{new}.py") for old, new in here.items()), *data.items()]:
        if old != new and (base / old).exists():
            (base / new).parent.mkdir(parents=True, exist_ok=True)
            git("mv", f"trimtab/{old}", f"trimtab/{new}.moving" if (base / new).exists() else f"trimtab/{new}")
    for name in git("ls-files", "trimtab").split():
        if name.endswith(".moving"):
            git("mv", name, name.removesuffix(".moving"))
    mover = Mover(files, data)
    for name in git("ls-files").splitlines():
        file = ROOT / name
        if name.startswith(HISTORY) or file.suffix not in TEXTS or not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        new_text = mover.python(text) if file.suffix == ".py" else mover.text(text)
        if file.suffix == ".py":
            new_text = wrapped(new_text)
        if new_text != text:
            file.write_text(new_text, encoding="utf-8", newline="")
    if "--back" not in sys.argv[1:]:
        open_rooms(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
