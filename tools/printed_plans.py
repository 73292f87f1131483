"""Puts plans into the docs as `trimtab plan` prints them, so that no line of them is typed by hand.

    python tools/printed_plans.py            write
    python tools/printed_plans.py --check    exit 1 if a page shows another plan than the command prints

A slot holds a command, and what it prints. The model is a config.json of a released one's size: a plan for a card reads no weights.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGES = tuple(ROOT / "docs" / name for name in ("fit-a-model.md", "read-a-plan.md", "mixtures.md"))
# Models of the pages -> sizes in bench/checkpoints.py.
MODELS = {"google/gemma-4-E4B-it": "e4b", "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b"}
SLOT = re.compile(r"(<!-- printed:plan -->\n +trimtab ([^\n]*)\n)(?:.*?)(<!-- /printed -->)", re.DOTALL)


@cache
def printed(command: str) -> str:
    """Return what a command of `trimtab` prints for a model of MODELS."""
    from bench.checkpoints import CLASSES, config_of
    from trimtab.cli import main as cli

    words = shlex.split(command)
    (model,) = set(words) & set(MODELS)
    config = config_of(MODELS[model])
    config.architectures, config.dtype = [CLASSES[MODELS[model]]], "bfloat16"
    with tempfile.TemporaryDirectory(prefix="trimtab-docs-") as folder, io.StringIO() as shown:
        config.save_pretrained(folder)
        with contextlib.redirect_stdout(shown):
            code = cli.main([folder if word == model else word for word in words])
        assert code == 0, (command, code)
        return shown.getvalue().replace(folder, model)


def filled(text: str) -> str:
    """Return a page's text with every slot filled by what its command prints."""

    def fill(slot: re.Match[str]) -> str:
        return f"{slot.group(1)}\n```text\n{printed(slot.group(2)).strip()}\n```\n{slot.group(3)}"

    return SLOT.sub(fill, text)


def main(arguments: list[str]) -> int:
    """Return 0 if every page shows what its commands print."""
    from tools.pages import write_or_check

    return write_or_check(
        PAGES, filled, arguments, is_wrong="shows another plan than is printed; run: python tools/printed_plans.py"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
