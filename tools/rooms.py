"""Updates the map of files in CONTRIBUTING.md: new files are added with their first sentence, deleted ones removed.

    python tools/rooms.py            rewrites the map
    python tools/rooms.py --check    exit code 1 if it would change

A line's text is kept, so that it can be improved by hand; an empty or useless one is made from the docstring again.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
# The order for a newcomer; a folder that is not listed comes last.
FOLDERS = ("", "checkpoint", "plan", "machine", "runtime", "bridge", "merge", "proof", "proof/remote", "speed", "report", "doctor",
           "serve", "commands",
           "demo")  # fmt: skip
# Folders with one small file per item: shown as one line.
CLOSED = ("doctor/upstream", "doctor/servers", "serve/http/page")
TITLES = {
    "checkpoint": "FILES (pure: no torch)", "plan": "PLANNING (pure: no torch)",
    "machine": "THIS MACHINE, AND CACHES BETWEEN RUNS (no torch)", "runtime": "THE RUNTIME",
    "bridge": "STOCK OBJECTS IN, STOCK OBJECTS OUT", "merge": "A CHECKPOINT AND ADAPTERS -> A NEW CHECKPOINT",
    "proof": "VERIFICATION", "proof/remote": "WHETHER A SERVER APPLIES ITS ADAPTER",
    "speed": "BENCHMARKS", "report": "REPORTS",
    "doctor": "THE DOCTOR", "serve": "THE SERVER", "commands": "THE COMMANDS",
    "demo": "THE DEMO: a small trained model, adapters, images, audio (CARD.md)",
    "doctor/servers": "known adapter bugs in other servers, one small file each",
    "doctor/upstream": "known bugs of other packages, one small file each", "serve/http/page": "the files of the page at /",
}  # fmt: skip
BLOCK = re.compile(r"```\n(trimtab/\n.*?)```", re.DOTALL)
WIDTH, SHORT, LONGEST = 28, 45, 100  # a beginning below SHORT is shown with what follows its colon


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
    sentence = re.split(r"(?<=[\w)`])[.;](?: |$)", text)[0].rstrip(".:")
    head = sentence.partition(": ")[0]
    text = head if len(head) >= SHORT else sentence
    # "POST /api" stays as it is, "The" and "A" become small.
    words = text if re.match(r"[A-Z]\w*[A-Z0-9]", text) else text[:1].lower() + text[1:]
    if len(words) <= LONGEST:
        return words
    return words[:LONGEST].rpartition(", ")[0] or words[: len(head)]


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
