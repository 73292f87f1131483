"""What else can be asked of a loaded model than one answer: the methods that `LoadedModel` has beside its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.checkpoint.adapter import read_adapter
from trimtab.errors import DoesNotFitError, gib
from trimtab.runtime import lora

if TYPE_CHECKING:
    from trimtab.runtime.conversation import Conversation


class Asking:
    """The base of `LoadedModel`: nothing here holds memory."""

    def chat(
        self, *, system: str | None = None, adapter: Any = None, when_full: str = "error", **options: Any
    ) -> Conversation:
        """Return a conversation whose turns are kept (`runtime/conversation.py`).

        adapter, options: as in `generate`, for every answer that does not say otherwise; without max_new_tokens an answer may
        take what is left of the context. when_full: "error" or "drop" (the oldest turns), once the context is full. Errors:
        RequestError.
        """
        from trimtab.runtime.conversation import Conversation

        return Conversation(self, system=system, adapter=adapter, when_full=when_full, **options)

    def reload_adapter(self: Any, name: str) -> bool:
        """Read an adapter's folder again if its files changed since it was loaded; returns whether they did.

        The new files are read and matched first: what is wrong with them leaves the old adapter in place. Errors: AdapterError,
        CheckpointError; DoesNotFitError if the new adapter is larger than the room that the plan leaves.
        """
        self._check_adapter(name)
        before = self._specs[name].file
        if tuple(read_adapter(before.folder).stamps) == tuple(before.stamps):
            return False
        held = self.read_adapter(before.folder)
        free = self.free_adapter_bytes() + self._adapter_bytes[name]
        if held.device_bytes > free:
            raise DoesNotFitError(
                f"the plan leaves {gib(max(free, 0))} for this adapter", block=f"adapter {name}", device=str(self.device),
                needed_bytes=held.device_bytes, budget_bytes=max(free, 0), hint="Plan with the new files",
            )  # fmt: skip
        with self._one_at_a_time("reload_adapter"), self._out_of_memory_named(f"loading adapter {name}"):
            lora.detach(self.hf_model, name, route=self.route)
            del self._specs[name], self._adapter_bytes[name]
            self._attach(name, held)
        return True
