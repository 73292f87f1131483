"""What stands for CUDA graphs on a CPU: a replay runs what was captured once more, in the state that it was captured in."""

from trimtab.engine.layers.leaves import GatheredTable, reading_staged
from trimtab.engine.memory.graph_cache import GraphCache, restore
from trimtab.engine.tiers.streaming import in_pass


class Again:
    """A graph of `run`, which returns tensors for `outputs`. replays: how often it was replayed."""

    def __init__(self, model, run, outputs):
        self.store, self.run, self.outputs, self.replays = model.adapter_store, run, outputs, 0
        self.state = {name: getattr(self.store, name) for name in ("selection", "applier")}
        self.tables = [one for one in model.hf_model.modules() if isinstance(one, GatheredTable) and one.reads_staged]

    def replay(self):
        self.replays += 1
        before = {name: getattr(self.store, name) for name in self.state}
        staged = [one for one in self.tables if not one.reads_staged]
        vars(self.store).update(self.state)
        try:
            with reading_staged(staged):
                for kept, made in zip(self.outputs, self.run(), strict=True):
                    kept.copy_(made)
        finally:
            vars(self.store).update(before)


def standing_in(monkeypatch, what):
    """Let caches capture without a GPU, and return the list of all captures of "a decode step" or "a prompt"."""

    def recorded(self, body, before, order, policy):
        with in_pass(policy.streamer, entered=order):
            expected = body.first()
        outputs = None if body.outputs is None else body.outputs(expected)
        restore(before)
        if outputs is None:
            outputs = [one.clone() for one in body.run()]
            restore(before)
        made.setdefault(policy.what, []).append(Again(policy.model, body.run, outputs))
        return made[policy.what][-1], outputs, expected

    made = getattr(GraphCache._recorded, "made", {})
    if not hasattr(GraphCache._recorded, "made"):
        recorded.made = made
        monkeypatch.setattr(GraphCache, "_recorded", recorded)
    return made.setdefault(what, [])
