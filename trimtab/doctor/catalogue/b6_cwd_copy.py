"""B6: PEFT writes a copy of the base checkpoint below the current folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit, behind_peft, failure

BUG = Bug(
    title="Loading an adapter on a base on disk copies the base checkpoint below the current folder",
    symptom="silent: ./<absolute path without its root>/model.safetensors appears, as large as the base; after a change of the "
    "current folder the next forward fails with FileNotFoundError",
    trigger="a base in a local folder with modules on \"disk\", its first adapter by PEFT with a map (B5)",
    cause="peft_model.py _update_offload splits the absolute path of the safetensors file, joins it again without its root, and "
    "saves a renamed copy there; only paths of the hub cache (with \"--\") get a separate name",
    affected=(Affected("peft"),),
    versions="peft 0.21.0 and 0.21.2, run: file written, and not found after chdir. 0.19.1 and 0.20.0 end before that (B5). "
    "Run from / the path would be the original file: deduced, not run",
    way_round="give PEFT no base on disk from a local folder; or run in a scratch folder and stay there",
    trackers=("huggingface/peft#1431 (the pull request that the code is from)",),
    trimtab="it reads the checkpoint in place and writes no copy of it",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on disk from an empty current folder, and list its files afterwards."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    on_disk = {key: "disk" if place == "cpu" else place for key, place in TOWERS_OFF.items()}
    model = kit.load(base, device_map=on_disk)
    with tempfile.TemporaryDirectory(dir=kit.folder, ignore_cleanup_errors=True) as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            kit.peft(model, adapter, device_map=behind_peft(on_disk))
        except KeyError as error:
            return Seen(NOT_APPLICABLE, f"PEFT ends before the copy is written (B5): {failure(error)}")
        finally:
            os.chdir(before)
        sizes = [file.stat().st_size for file in Path(folder).rglob("*.safetensors")]
    original_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if not sizes:
        return Seen(FIXED, "nothing was written below the current folder")
    return Seen(PRESENT, f"{sum(sizes)} B written below the current folder, the base's file has {original_bytes} B")
