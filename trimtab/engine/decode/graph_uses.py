"""How often forms of a prompt's pass were needed lately: whether capturing one pays where another graph is evicted for it.

    uses = FormUses()
    uses.note(key)
    uses.pays(key, oldest)     # oldest: of the graph that would be dropped, None where there is room

A graph that is captured at each need and dropped before its next one costs more than the pass that it replaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

# After this many passes, earlier counts are halved.
PERIOD = 64
# Forms that are remembered.
MOST_FORMS = 4096


class FormUses:
    """Counts of forms: counts before the last passes are halved, but never below one."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._noted = 0

    def note(self, key: Hashable) -> None:
        """Count a pass of this form."""
        self._counts[key] += 1
        self._noted += 1
        if self._noted % PERIOD == 0:
            often = self._counts.most_common(MOST_FORMS)
            self._counts = Counter({form: max(count // 2, 1) for form, count in often})

    def pays(self, key: Hashable, oldest: Hashable | None) -> bool:
        """Whether a form is to be captured: it is needed again, and more often than the one that would be dropped."""
        return self._counts[key] > 1 and (oldest is None or self._counts[key] > self._counts[oldest])
