"""Rendering a chat template: transformers' own text within a budget, and an error that names the template's line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from trimtab.engine.templates.budget import metered
from trimtab.errors import CheckpointError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment

    from trimtab.engine.formats.hf_types import ChatTemplateOwner

# Places of a template, in the order of reading.
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Errors of a template that refuses messages: on purpose (`raise_exception`), or for messages of another form.
REFUSALS = (TemplateError, ValueError, TypeError, KeyError)
# How jinja2 names the code of a template in tracebacks.
_CODE_NAMES = ("<template>", "<unknown>")
_HINT = "Correct the template, or use the one of another copy of the model"


class _Here(threading.local):
    is_metered = False


_here = _Here()
_installing = threading.Lock()


def render(owner: ChatTemplateOwner, messages: Sequence[object], folder: Path, **options: object) -> str:
    """Return the text that `owner.apply_chat_template` renders: a processor's or tokenizer's. folder: where its files are.

    Errors: REFUSALS as they are; CheckpointError, with the template's line, for one that cannot be compiled, that fails, or that
    takes more steps, characters or depth than its budget (budget.py).
    """
    try:
        with _metered():
            return str(owner.apply_chat_template(messages, tokenize=False, **options))
    except Exception as exc:
        if isinstance(exc, REFUSALS) and not isinstance(exc, (SecurityError, TemplateSyntaxError)):
            raise
        line = _line(exc)
        where = f" in line {line}" if line else ""
        kind = "" if isinstance(exc, TemplateError) else f"{type(exc).__name__.removesuffix('Error')}: "
        reason = f"{kind}{exc}".strip(": ") if not type(exc).__module__.startswith("trimtab") else str(exc)
        raise CheckpointError(f"its chat template fails{where} ({reason})", path=template_path(folder), hint=_HINT) from exc


def template_path(folder: Path) -> Path:
    """Return the file in which the chat template of a folder stands, the folder if none is there."""
    return next((folder / name for name in FILES if (folder / name).is_file()), folder)


def _line(error: BaseException) -> int | None:
    """Return the line of a template in which an error was raised."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, step = getattr(error, "template_line", None), error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in _CODE_NAMES:
            line = step.tb_lineno
        step = step.tb_next
    return line


@contextmanager
def _metered() -> Iterator[None]:
    """Let transformers render with the budget, in this thread."""
    _install()
    before, _here.is_metered = _here.is_metered, True
    try:
        yield
    finally:
        _here.is_metered = before


def _install() -> None:
    """Put a switch where transformers compiles templates: every processor's own way to it stays as it is.

    Only threads inside `_metered` get the budget, so that stock transformers in the same process stays stock.
    """
    from transformers.utils import chat_template_utils

    with _installing:
        stock = chat_template_utils._compile_jinja_template
        if getattr(stock, "is_switch", False):
            return

        def compile_template(chat_template: str) -> object:
            if not _here.is_metered:
                return stock(chat_template)
            compiled = _compiled(chat_template, stock)
            if isinstance(compiled, Exception):
                raise compiled
            return compiled

        compile_template.is_switch = True  # type: ignore[attr-defined]
        chat_template_utils._compile_jinja_template = compile_template


@lru_cache(maxsize=16)
def _compiled(template: str, stock: Callable[[str], Template]) -> Template | Exception:
    """Return a compiled template, or why it cannot be compiled: a failure is not tried again at every request."""
    try:
        return _environment(stock).from_string(template)
    except Exception as exc:
        return exc.with_traceback(None)


@lru_cache(maxsize=1)
def _environment(stock: Callable[[str], Any]) -> SandboxedEnvironment:
    return metered(stock("").environment)
