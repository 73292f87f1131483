"""Which tiny mixture counts? Each of its experts has one word to say, so a wrong expert, slot or adapter is a wrong word.

Its first layer's experts mark which word stands there, those of the second choose by the mark and say the next word: "two" is
answered with "three four five six seven eight one two". Nothing is trained. Every weight of an expert is zero or the largest of its
block, so formats of 4 and 8 bits do not round it. Of the two experts of a token the second is the next one, with a small weight.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.adapter_files import write_tensors

ENGLISH = ("one", "two", "three", "four", "five", "six", "seven", "eight")
GERMAN = ("eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht")
COUNT, WIDTH, INNER, FIRST_ID = len(ENGLISH), 64, 128, 3
# Directions of the hidden state: of every token, and the first of the marks and of the words of both languages.
_EVERY, _MARKS, _WORDS = WIDTH - 1, 16, 32
_LAYER = "model.layers.{}.mlp.experts"


def ids(*words: str) -> list[int]:
    return [FIRST_ID + (*ENGLISH, *GERMAN).index(word) for word in words]


def words(token_ids: list[int]) -> list[str]:
    return [(*ENGLISH, *GERMAN)[token - FIRST_ID] for token in token_ids]


def build(folder: Path) -> Path:
    """Write the checkpoint, of Qwen3 MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=WIDTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, num_experts=COUNT, num_experts_per_tok=2,
        moe_intermediate_size=INNER, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        every = (model.model.embed_tokens.weight, model.lm_head.weight)
        for weight in every:
            weight.zero_()
        for number in range(2 * COUNT):
            model.model.embed_tokens.weight[FIRST_ID + number, [number % COUNT, _EVERY]] = 1
            model.lm_head.weight[FIRST_ID + number, _WORDS + number] = 4
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            for weight in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.zero_()
            layer.mlp.experts.gate_up_proj[:, [0, INNER], _EVERY] = 0.25
            for expert in range(COUNT):
                layer.mlp.gate.weight[expert, expert + number * _MARKS] = 0.5
                if not number:
                    layer.mlp.gate.weight[expert, (expert - 1) % COUNT] = 0.25
                layer.mlp.experts.down_proj[expert, _says(number, expert), 0] = 1
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _says(layer: int, expert: int) -> int:
    return _WORDS + (expert + 1) % COUNT if layer else _MARKS + expert


def adapter(folder: Path, kind: str) -> Path:
    """Write an adapter on experts. kind: "german" says the next word in German, "skip" leaves out one (both PEFT's
    target_parameters, rank 2: what is taken away and what is added), "five" says one word in German (a pair for one expert)."""
    tensors: dict[str, torch.Tensor] = {}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "task_type": "CAUSAL_LM", "target_modules": []}
    layer = 0 if kind == "skip" else 1
    A, B = torch.zeros(COUNT, 2, INNER), torch.zeros(COUNT, WIDTH, 2)
    A[:, :, 0] = 1
    for expert in range(COUNT):
        own = _says(layer, expert)
        B[expert, own, 0] = -1
        B[expert, _says(0, (expert + 1) % COUNT) if kind == "skip" else own + COUNT, 1] = 1
    stem = f"base_model.model.{_LAYER.format(layer)}"
    if kind == "five":
        expert = ENGLISH.index("four")
        stem = f"{stem}.{expert}.down_proj"
        tensors = {f"{stem}.lora_A.weight": A[expert], f"{stem}.lora_B.weight": B[expert]}
        config["target_modules"] = [f"experts.{expert}.down_proj"]
    else:  # of lora_B's columns the expert is the fastest index
        tensors = {f"{stem}.lora_A.weight": A.reshape(-1, INNER), f"{stem}.lora_B.weight": B.permute(1, 2, 0).reshape(WIDTH, -1)}
        config["target_parameters"] = [f"layers.{layer}.mlp.experts.down_proj"]
    return write_tensors(folder, {name: value.contiguous() for name, value in tensors.items()}, config)


def counted(word: str, tokens: int, kind: str | None = None) -> list[str]:
    """Return what is said behind a word, computed here."""
    step, said, number = 2 if kind == "skip" else 1, [], (ENGLISH.index(word))
    for _ in range(tokens):
        number = (number + step) % COUNT
        is_german = kind == "german" or (kind == "five" and ENGLISH[number] == "five")
        said.append((GERMAN if is_german else ENGLISH)[number])
    return said
