"""Few questions to a server, chosen once: a model and its adapter choose the same ones in every test."""

import pytest

from trimtab.verification.server import choosing
from trimtab.verification.server.channels import Question

_CHOSEN = {}


@pytest.fixture
def few_questions(monkeypatch):
    monkeypatch.setattr(choosing, "TEXTS", 12)
    monkeypatch.setattr(choosing, "GENERATED", 8)
    for function in (choosing._generated, choosing._kl):
        monkeypatch.setattr(choosing, function.__name__, once(function))


def once(function):
    """Return a function of a reference, a question and a length that computes each value once in this process."""

    def known(reference, *given):
        asked = tuple((one.ids, one.image, one.audio) if isinstance(one, Question) else one for one in given)
        key = function, str(reference.model.plan.request), reference.spec.file.stamps, asked
        if key not in _CHOSEN:
            _CHOSEN[key] = function(reference, *given)
        return _CHOSEN[key]

    return known
