"""Keeps CONTRIBUTING's picture of the rooms true: new files are added with their first sentence, gone ones taken out.

    python tools/rooms.py            rewrites the picture
    python tools/rooms.py --check    exit code 1 if it would change

A line's words are kept as they are, so that they can be made better by hand.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
# The order in which a newcomer meets them; a folder that is not here comes last.
FOLDERS = ("", "checkpoint", "plan", "runtime", "bridge", "merge", "proof", "speed", "doctor", "serve", "commands",
           "demo")  # fmt: skip
# Folders with one small file a thing: shown as one line.
CLOSED = ("doctor/upstream", "serve/page")
TITLES = {
    "checkpoint": "WHAT IS ON DISK (pure: no torch)", "plan": "WHAT GOES WHERE (pure: no torch)", "runtime": "WHAT RUNS",
    "bridge": "STOCK OBJECTS IN, STOCK OBJECTS OUT", "merge": "A CHECKPOINT AND ADAPTERS -> A NEW CHECKPOINT",
    "proof": "WHAT IS RIGHT", "speed": "HOW FAST IT IS, AND WHAT THE LIMIT IS",
    "doctor": "WHAT IS BROKEN", "serve": "WHO ASKS", "commands": "WHAT EACH COMMAND DOES",
    "demo": "WHAT CAN BE TRIED: a small trained model, adapters, pictures, sounds (CARD.md)",
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
    text = re.split(r"(?<=[a-z)])[.:;] ", text)[0].rstrip(".")
    words = text[:1].lower() + text[1:]
    return words if len(words) <= LONGEST else words[:LONGEST].rsplit(" ", 1)[0].rstrip(",") + " ..."


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
            words = known.get(path) or first_words(ROOT / "trimtab" / path)
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
    if "--check" in sys.argv[1:]:
        return int(new != text)
    GUIDE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
