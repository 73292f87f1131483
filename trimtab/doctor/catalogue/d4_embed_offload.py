"""D4: Gemma 4 with per-layer embeddings cannot run with its token embedding offloaded."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="Offloading embed_tokens of an E-series Gemma 4 breaks every forward pass, text too",
    symptom="RuntimeError: Tensor on device meta is not on the expected device (torch.where)",
    trigger="language_model.embed_tokens on \"cpu\" or \"disk\" in a Gemma 4 with per-layer embeddings (E2B, E4B), "
    "by a map or by \"auto\" under memory pressure",
    cause="transformers modeling_gemma4.py Gemma4Model.forward reads embed_tokens.weight[pad_token_id] itself, "
    "outside the module's forward, so that no hook brings the weight",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run; offloading the tied head as well does not help",
    way_round="keep embed_tokens on the GPU; embed_tokens_per_layer, the large table, can be offloaded",
    trackers=("huggingface/transformers#48409 (pull request, closed)",),
    trimtab="embed_tokens of such a model stays on the execution device, and a map that sends it away is refused "
    "with the reason",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a text through a Gemma 4 whose embedding table, and the head tied to it, are offloaded."""
    language = "model.language_model"
    resident = ["layers", "norm", "rotary_emb", "per_layer_model_projection", "per_layer_projection_norm"]
    places: dict[str, int | str] = {f"{language}.{name}": 0 for name in (*resident, "embed_tokens_per_layer")}
    places |= dict.fromkeys(("vision_tower", "audio_tower", "embed_vision", "embed_audio"), 0)
    places = {name if name.startswith("model.") else f"model.{name}": place for name, place in places.items()}
    model = kit.load(kit.checkpoint(), device_map=places | {f"{language}.embed_tokens": "cpu", "lm_head": "cpu"})
    try:
        kit.forward(model)
    except RuntimeError as error:
        if "expected device" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "a text prompt ran with embed_tokens offloaded")
