"""Keeps CONTRIBUTING's picture of the rooms true: new files are added with their first sentence, gone ones taken out.

    python tools/rooms.py            rewrites the picture
    python tools/rooms.py --check    exit code 1 if it would change

A line's words are kept as they are, so that they can be made better by hand; words that say nothing are made anew.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
# The order in which a newcomer meets them; a folder that is not here comes last.
FOLDERS = ("", "checkpoint", "plan", "machine", "runtime", "bridge", "merge", "proof", "proof/remote", "speed", "doctor",
           "serve", "commands",
           "demo")  # fmt: skip
# Folders with one small file a thing: shown as one line.
CLOSED = ("doctor/upstream", "doctor/servers", "serve/page")
TITLES = {
    "checkpoint": "WHAT IS ON DISK (pure: no torch)", "plan": "WHAT GOES WHERE (pure: no torch)",
    "machine": "WHAT THIS MACHINE IS, AND WHAT IS KEPT BETWEEN RUNS (no torch)", "runtime": "WHAT RUNS",
    "bridge": "STOCK OBJECTS IN, STOCK OBJECTS OUT", "merge": "A CHECKPOINT AND ADAPTERS -> A NEW CHECKPOINT",
    "proof": "WHAT IS RIGHT", "proof/remote": "WHETHER A SERVER'S ADAPTER IS ALIVE",
    "speed": "HOW FAST IT IS, AND WHAT THE LIMIT IS",
    "doctor": "WHAT IS BROKEN", "serve": "WHO ASKS", "commands": "WHAT EACH COMMAND DOES",
    "demo": "WHAT CAN BE TRIED: a small trained model, adapters, pictures, sounds (CARD.md)",
    "doctor/servers": "known bugs of adapters in other servers, one small file each",
    "doctor/upstream": "known bugs of other packages, one small file each", "serve/page": "the page at /, as it is sent",
}  # fmt: skip
BLOCK = re.compile(r"```\n(trimtab/\n.*?)```", re.DOTALL)
WIDTH, LONGEST = 28, 90


def shown_files() -> dict[str, list[str]]:
    """Return folder -> file names that the picture shows, both in order."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "trimtab").rglob("*.py")):
        folder = file.parent.relative_to(ROOT / "trimtab").as_posix().removeprefix(".")
        if any(folder == closed or folder.startswith(f"{closed}/") for closed in CLOSED):
            continue
        # A folder's own __init__.py says the same as the folder's line.
        if file.name != "__init__.py" or not folder:
            found.setdefault(folder, []).append(file.name)
    order = [folder for folder in FOLDERS if folder in found]
    return {folder: found[folder] for folder in [*order, *sorted(set(found) - set(FOLDERS))]}


def first_words(file: Path) -> str:
    """Return the beginning of a file's docstring, short enough for one line."""
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0].replace("\n", " ")
    text = re.split(r"(?<=[a-z)`])[.:;](?: |$)", text)[0].rstrip(".")
    # "POST /api" stays as it is, "What" and "A" become small.
    words = text if re.match(r"[A-Z][A-Z0-9]", text) else text[:1].lower() + text[1:]
    if len(words) <= LONGEST:
        return words
    return words[:LONGEST].rpartition(", ")[0] or words


def problem(words: str) -> str:
    """Return what is wrong with the words of one line, "" if they can stand: a few whole words in their own spelling."""
    if len(words.split()) < 2 or len(words) < 8:
        return "says nothing"
    if re.match(r"[a-z][A-Z]", words):
        return "its first word is misspelled"
    if len(words) > LONGEST + 30:
        return "is too long"
    return "is not the end of a sentence" if words.endswith((":", ",", " ...")) else ""


def problems(block: str) -> list[str]:
    """Return what is wrong with a picture, line by line; two lines with the same words say too little as well."""
    known = known_words(block)
    shown = list(known.values())
    found = [f"{path}: {words!r} {why}" for path, words in known.items() if (why := problem(words))]
    return found + [f"{path}: {words!r} stands twice" for path, words in known.items() if shown.count(words) > 1]


def known_words(block: str) -> dict[str, str]:
    """Return path -> words of the picture as it is."""
    folder, found = "", {}
    for line in block.splitlines()[1:]:
        name, _, words = line.strip().partition(" ")
        if name.endswith("/"):
            folder = name.rstrip("/")
            continue
        is_top = not line.startswith("    ")
        found[name if is_top else f"{folder}/{name}"] = words.strip()
    return found


def picture(block: str) -> str:
    """Return the picture of the tree as it is now."""
    known, lines = known_words(block), ["trimtab/"]
    for folder, names in shown_files().items():
        if folder:
            lines.append(f"  {folder + '/':<{WIDTH - 2}}{TITLES.get(folder, '')}".rstrip())
        for name in names:
            path = f"{folder}/{name}" if folder else name
            words = known.get(path, "")
            if problem(words):
                words = first_words(ROOT / "trimtab" / path)
            lead = "    " if folder else "  "
            lines.append(f"{lead}{name:<{WIDTH - len(lead)}}{words}".rstrip())
        for closed in CLOSED:
            if folder and closed.startswith(f"{folder}/") and (ROOT / "trimtab" / closed).is_dir():
                lines.append(f"    {closed.partition('/')[2] + '/':<{WIDTH - 4}}{TITLES[closed]}")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Return the guide with its picture made true."""
    found = BLOCK.search(text)
    assert found is not None
    return text[: found.start(1)] + picture(found.group(1)) + text[found.end(1) :]


def main() -> int:
    text = GUIDE.read_text(encoding="utf-8")
    new = filled(text)
    block = BLOCK.search(new)
    wrong = problems(block.group(1)) if block is not None else []
    for line in wrong:
        print(f"CONTRIBUTING.md: {line}: make the first sentence of the file's docstring better", file=sys.stderr)
    if "--check" in sys.argv[1:]:
        return int(new != text or bool(wrong))
    GUIDE.write_text(new, encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
