"""E3: adapter weights for modules that the configuration does not name are dropped."""

from __future__ import annotations

import json
import shutil

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure, quiet

BUG = Bug(
    title="Adapter weights that the configuration does not target are dropped silently",
    symptom="silent: tensors of the file for modules outside target_modules (towers left out of it, for example) are "
    "not applied",
    trigger="PeftModel.from_pretrained with a config whose target_modules is narrower than the file; "
    "PeftModel.load_adapter returns the names as unexpected_keys, and warns no more than that",
    cause="PEFT utils/save_and_load.py loads with strict=False, and peft_model.py from_pretrained warns of missing "
    "keys alone",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run (both, not only the newest)",
    way_round="compare the keys of the file with those of the loaded model, or read what load_adapter returns",
    trackers=(
        "huggingface/peft#2118 (warns of missing keys alone, merged)",
        "huggingface/peft#481 (load_adapter returns the names, merged)",
    ),
    trimtab="target_modules is not what decides: every key of the file is matched, and one that fits nothing is an "
    "error",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a file with weights for q_proj and v_proj under a configuration that names only q_proj."""
    path = kit.checkpoint("llama")
    narrow = kit.folder / "e3"
    if not narrow.exists():
        shutil.copytree(kit.adapter(path, targets=["q_proj", "v_proj"]), narrow)
        config = json.loads((narrow / "adapter_config.json").read_text(encoding="utf-8"))
        (narrow / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}), encoding="utf-8")
    base = kit.load(path)
    with quiet() as messages:
        try:
            model = kit.peft(base, narrow)
        except (KeyError, RuntimeError, ValueError) as error:
            if "v_proj" not in str(error):
                raise
            return Seen(FIXED, f"refused: {failure(error)}")
    if any("v_proj" in name and "lora_" in name for name, _ in model.named_parameters()):
        return Seen(FIXED, "the weights were applied although target_modules does not name their module")
    reports = [line for line in messages if "unexpected" in line.lower() or "v_proj" in line]
    if reports:
        return Seen(FIXED, f"said: {reports[0][:120]}")
    return Seen(PRESENT, "4 tensors of the file were not applied, and nothing was reported")
