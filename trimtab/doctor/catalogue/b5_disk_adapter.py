"""B5: an adapter on a base that is partly on disk."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, behind_peft, failure

BUG = Bug(
    title="PEFT cannot load an adapter on a base with modules on disk, unless it is given a map",
    symptom="newest: NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty(). "
    "oldest: KeyError: 'base_model.model.model.model.audio_tower...' in _update_offload, also with a map",
    trigger="a base with \"disk\" in its device map, its first adapter",
    cause="newest: PEFT's own plan finds room on one device (B1) and calls model.to() on weights that are on meta. oldest: "
    "peft_model.py _update_offload joins the names of modules wrongly",
    affected=(Affected("peft"),),
    versions="run: peft 0.19.1 and 0.20.0 fail with and without a map; 0.21.0 and 0.21.2 fail without one, and with a map "
    "behind base_model.model. they load and equal the unsplit model",
    way_round="peft 0.21.0 or newer, with the base's map, every key behind base_model.model.; mind B6",
    trackers=("huggingface/peft#3468 (merged: the join of names)",),
    trimtab="the disk tier reads the checkpoint's own file; an adapter on such a layer is kept with its device",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on disk, without a map and with one of the right names."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    on_disk = {key: "disk" if place == "cpu" else place for key, place in TOWERS_OFF.items()}
    failed, messages = False, []
    for name, options in (("no map", {}), ("a map", {"device_map": behind_peft(on_disk)})):
        try:
            model = kit.peft(kit.load(base, device_map=on_disk), adapter, **options)
            apart = float((kit.forward(model) - kit.forward(kit.peft(kit.load(base), adapter))).abs().max())
        except (KeyError, NotImplementedError) as error:
            failed = True
            messages.append(f"{name}: {failure(error)}")
        else:
            failed |= apart != 0
            messages.append(f"{name}: logits differ by {apart:.3g} from the unsplit model's")
    return Seen(PRESENT if failed else FIXED, "; ".join(messages))
