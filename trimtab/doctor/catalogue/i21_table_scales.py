"""I21: transformers refuses a Gemma mobile table with several scales a row, which its own layer computes."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet

BUG = Bug(
    title="A Gemma 4 mobile checkpoint whose per-layer table has a scale for each layer is refused",
    symptom="RuntimeError: You set `ignore_mismatched_sizes` to `False`, after a table with embedding_scale | MISMATCH",
    trigger="a checkpoint with GemmaQuantizationConfig and quantize_embeddings whose embedding_scale is [rows, n], n above 1",
    cause="integrations/gemma_quant.py QuantizedEmbedding makes embedding_scale [rows, 1]; _dequantize_weights takes several",
    affected=(Affected("transformers", since="5.12.0"),),
    versions="transformers 5.23.0, run; 5.12.0 has the class, 5.8.0 has not (read)",
    way_round="load with the first scale of each row, then set embedding_scale to the file's own tensor",
    trimtab="it reads such tables (mobile4-g256 in a plan)",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a model of one layer whose table has two scales a row."""
    import torch
    import transformers

    if not hasattr(transformers, "GemmaQuantizationConfig"):
        return Seen(NOT_APPLICABLE, "transformers has no GemmaQuantizationConfig")
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    state = dict(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).state_dict())
    del state["model.embed_tokens.weight"]
    state["model.embed_tokens.embedding_quantized"] = torch.ones(8, 16, dtype=torch.int8)
    state["model.embed_tokens.embedding_scale"] = torch.ones(8, 2)
    settings = {
        "quant_method": "gemma", "num_bits": 8, "quantize_embeddings": True, "modules_to_not_convert": ["model.layers", "lm_head"],
    }  # fmt: skip
    config = transformers.LlamaConfig(**sizes, quantization_config=settings)
    with quiet():
        try:
            model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)
        except RuntimeError as exc:
            if "mismatched_sizes" in str(exc):
                return Seen(PRESENT, f"RuntimeError: {str(exc)[:120]}")
            return Seen(UNKNOWN, f"{type(exc).__name__}: {exc}")
    return Seen(FIXED, f"the table has scales {list(model.model.embed_tokens.embedding_scale.shape)}")
