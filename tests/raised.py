"""How does a test get the error of a call, to look at its fields, and how does it let a call fail?"""

from functools import partial

import pytest

from trimtab.errors import RequestError


def raised(error, call, /, *arguments, match=None, **options):
    """Return the error of this class that call(*arguments, **options) raises. match: a regular expression that its text has."""
    with pytest.raises(error, match=match) as caught:
        call(*arguments, **options)
    return caught.value


refused = partial(raised, RequestError)


def raising(error, /):
    """Return a function of any arguments that raises this error."""

    def fail(*args, **options):
        raise error

    return fail
