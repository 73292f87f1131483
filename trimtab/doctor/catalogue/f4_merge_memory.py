"""F4: PEFT merges only a base that is completely in memory."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="Merging with PEFT needs the whole base in memory",
    symptom="out of memory while merging models larger than host memory, or machines that swap",
    trigger="merge_and_unload of a large base, in bfloat16 as F1 advises",
    cause="PEFT tuners_utils.py _unload_and_optionally_merge works on loaded modules; a module without data is "
    "merged without an error and stays without data",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run: merging into weights that are not in memory does nothing, silently",
    way_round="a tool that merges the files shard by shard",
    trackers=(
        "huggingface/peft#1939 (closed)",
        "unslothai/unsloth#432 (crash, reported by others)",
        "axolotl-ai-cloud/axolotl#3095 (shard by shard, merged)",
    ),
    trimtab="a merge works from the checkpoint's files, one tensor in memory at a time",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Merge an adapter into a base whose weights were never read."""
    import torch
    import transformers

    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(path))
    model = kit.peft(base, adapter)
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return Seen(PRESENT, f"a base that is not in memory is refused: {failure(error)}")
    weight = merged.model.layers[0].self_attn.q_proj.weight
    if weight.is_meta:
        return Seen(PRESENT, "a base that is not in memory is merged without an error, and holds no data afterwards")
    return Seen(FIXED, "weights were read for the merge")
