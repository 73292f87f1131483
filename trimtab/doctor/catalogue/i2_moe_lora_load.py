"""I2: with an older PEFT and transformers 5, no adapter loads on a mixture of experts."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="No LoRA loads on Mixtral or Qwen3-MoE: unexpected keyword argument 'distributed_operation'",
    symptom="TypeError: WeightConverter.__init__() got an unexpected keyword argument 'distributed_operation'",
    trigger="any adapter, on attention alone too, on a model whose experts transformers converts at load; through "
    "PEFT and through transformers load_adapter",
    cause="PEFT utils/transformers_weight_conversion.py build_peft_weight_mapping gives WeightConverter arguments "
    "that its __init__ does not take",
    affected=(Affected("peft", fixed_in="0.20.0"),),
    versions="peft 0.19.1 with transformers 5.6.2 run, fails; peft 0.21.2 with 5.23.0 run, loads; 0.20.0 has the "
    "cure (read)",
    way_round="a newer PEFT",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#3372 (closed)",
        "huggingface/peft#3553 (the attribute of later transformers, pull request, closed)",
    ),
    trimtab="it reads adapter files itself",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter on the attention of a tiny Mixtral."""
    path = kit.checkpoint("mixtral")
    adapter = kit.adapter(path, targets=["q_proj"])
    base = kit.load(path)
    try:
        kit.peft(base, adapter)
    except (AttributeError, TypeError) as error:
        if "distributed_operation" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "an adapter on attention was loaded on a tiny Mixtral")
