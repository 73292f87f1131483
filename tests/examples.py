"""How many examples hypothesis makes: a quarter of what a test names in every run, all of them beside the slow tests."""

import os

MAKES_ALL = os.environ.get("TRIMTAB_TEST_EXAMPLES") == "all"  # `make test-slow` sets it


def examples(count: int) -> int:
    """Return how many of so many examples this run makes."""
    return count if MAKES_ALL else count // 4
