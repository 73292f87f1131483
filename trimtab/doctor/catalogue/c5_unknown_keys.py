"""C5: a key of a device map that names no module is kept with a warning."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure, installed_source, quiet

BUG = Bug(
    title="A device map key that names nothing is only a warning, and stays in hf_device_map",
    symptom="one UserWarning \"The following device_map keys do not match any submodules in the model\", and the key "
    "stays in hf_device_map; with a \"\" key the modules it was meant for go elsewhere. No warning at all for models "
    "that define _no_placement_params",
    trigger="a key from another model or another release, such as model.multi_modal_projector on Gemma 4",
    cause="accelerate utils/modeling.py check_device_map warns; transformers integrations/accelerate.py "
    "skip_device_map_check replaces it for models with _no_placement_params (qwen4_exp alone in 5.23.0)",
    affected=(Affected("accelerate", since="1.9.0"),),
    versions="accelerate 1.13.0 and 1.15.0 run; before 1.9.0 there was no warning; the silent exception is in "
    "transformers 5.18.0 to 5.23.0 and not in 5.15.0 (read)",
    way_round="compare the keys with model.named_modules() before loading",
    owner=("accelerate", "transformers"),
    trackers=("huggingface/accelerate#3584 (open when last seen)", "huggingface/accelerate#3613 (the warning, merged)"),
    trimtab="a key that names no module is an error that lists the near names",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load with a key that names nothing."""
    bad = "model.multi_modal_projector"
    with quiet() as messages:
        try:
            model = kit.load(kit.checkpoint("llama"), device_map={bad: "cpu", "": 0})
        except (KeyError, ValueError) as error:
            if bad not in str(error):
                raise
            return Seen(FIXED, f"refused: {failure(error)}")
    warning_count = sum(bad in line for line in messages)
    silent = installed_source("transformers.integrations.accelerate", "def skip_device_map_check")
    also = f"; silenced for models with _no_placement_params by {silent[0]}:{silent[1]}" if silent else ""
    kept = "stays in" if bad in model.hf_device_map else "is removed from"
    return Seen(PRESENT, f"loads with {warning_count} warning(s); the key {kept} hf_device_map{also}")
