"""D5: a split Gemma 4 combines tensors on different devices."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import TOWERS_OFF, Kit, failure

BUG = Bug(
    title="Gemma 4 split over GPU and CPU: \"Expected all tensors to be on the same device\"",
    symptom="RuntimeError: Expected all tensors to be on the same device, for rotary tables, inputs, layer_scalar, "
    "the attention mask or mm_token_type_ids",
    trigger="decoder layers or towers on the CPU by device_map, reported for 26B-A4B in int8 with LoRA",
    cause="transformers modeling_gemma4.py combines tensors that were made on different devices; 5.23.0 has some of "
    "the moves that were missing",
    affected=(Affected("transformers"),),
    versions="reported by others; the tiny model with towers and two decoder layers on the CPU is what the probe "
    "runs, and only a GPU can show it",
    way_round="keep whole parts together; check with one forward pass of text, image and audio",
    trackers=("huggingface/transformers#45482 (open when last seen)",),
    trimtab="weights come to the execution device; where a block computes on the CPU, its own layers move inputs and "
    "outputs",
    evidence="tracker",
)  # fmt: skip


NEEDS_GPU = True
PROJECTIONS = ("per_layer_model_projection", "per_layer_projection_norm")


def probe(kit: Kit) -> Seen:
    """Run text, image and audio through a Gemma 4 with towers, then with decoder layers, on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU here, and the CPU alone cannot show tensors on different devices")
    main = "cuda:0"
    towers = {name: main if place == 0 else place for name, place in TOWERS_OFF.items()}
    layers = {f"model.language_model.layers.{number}": "cpu" if number in (1, 4) else main for number in range(5)}
    rest = ("embed_tokens", "embed_tokens_per_layer", "norm", "rotary_emb", *PROJECTIONS)
    split = dict.fromkeys(towers, main) | layers | {f"model.language_model.{name}": main for name in rest}
    del split["model.language_model"]
    failures = []
    for title, places in (("towers", towers), ("decoder layers", split)):
        model = kit.load(kit.checkpoint(), device_map=places)
        for kind in ("text", "image", "audio"):
            inputs = {name: tensor.to(main) for name, tensor in kit.inputs(model, kind).items()}
            try:
                with torch.no_grad():
                    model(**inputs)
            except RuntimeError as error:
                if "same device" not in str(error) and "expected device" not in str(error):
                    raise
                failures.append(f"{title} on the CPU, {kind}: {failure(error)}")
    if failures:
        return Seen(PRESENT, "; ".join(failures))
    return Seen(FIXED, "text, image and audio ran with towers, and with decoder layers, on the CPU")
