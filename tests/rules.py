"""One test for one rule of texts or data: `each` goes through all files or records and names every one that breaks the rule."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def each(
    names: str, items: Iterable[Any] | Callable[[], Iterable[Any]], *, where: Callable[[Any], object] = repr
) -> Callable[..., Any]:
    """Call a test with every item, as `pytest.mark.parametrize` does, within one test that fails once.

    names: the arguments that an item gives, as parametrize takes them. items: also a function that finds them when the test
    runs. where: what a failure calls an item; a file is called by its path from the root. The other arguments of the test are
    fixtures, which all items share.
    """
    arguments = [name.strip() for name in names.split(",")]
    given = items if callable(items) else list(items)

    def gather(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            listed = list(given() if callable(given) else given)
            assert listed, "there is nothing to check"
            problems = []
            for item in listed:
                values = [item] if len(arguments) == 1 else item
                try:
                    check(**dict(zip(arguments, values, strict=True)), **fixtures)
                except (Exception, SystemExit) as exc:
                    problems.append(f"{_name_of(item, where)}: {_text_of(exc, check.__code__.co_filename)}")
            if problems:
                pytest.fail(f"{len(problems)} of {len(listed)}:\n" + "\n".join(problems), pytrace=False)

        signature = inspect.signature(check)
        fixtures = [one for name, one in signature.parameters.items() if name not in arguments]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return gather


def _name_of(item: Any, where: Callable[[Any], object]) -> object:
    return item.relative_to(ROOT).as_posix() if isinstance(item, Path) else where(item)


def _text_of(exc: BaseException, test_file: str) -> str:
    """Return what failed in which line of the test: the words of an assertion, or another error with its class."""
    lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == test_file]
    words = str(exc) if isinstance(exc, AssertionError) else f"{type(exc).__name__}: {exc}"
    return f"{words} (line {lines[-1]} of the test)"
