"""C3: a split model whose map has an empty key cannot be saved."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="save_pretrained of a split model fails if its device map has a \"\" key",
    symptom="AttributeError: 'SequentialHook' object has no attribute 'weights_map'",
    trigger="save_pretrained of a model loaded with \"\" and \"cpu\" in one map",
    cause="transformers integrations/accelerate.py load_offloaded_parameter reads weights_map of the module's hook, "
    "which is a SequentialHook there (C2)",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0 run (not only the newest); a map without \"\" saves in both",
    way_round="load with a map without \"\" before saving",
    owner=("transformers", "accelerate"),
    trimtab="it has no hooks; a merged checkpoint is written from the files, not from a loaded model",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Save a model of two layers, one of them offloaded, the rest placed by the empty key."""
    model = kit.load(kit.checkpoint("llama"), device_map={"model.layers.1": "cpu", "": 0})
    try:
        model.save_pretrained(str(kit.folder / "c3"))
    except AttributeError as error:
        if "weights_map" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, 'a model with "" and "cpu" in its map was saved')
