"""Which Llama every server can hold: random weights, a byte-level tokenizer, a chat template, an adapter written by PEFT.

Weights are drawn so that answers are sure of themselves and the adapter changes them; no download.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

RANK, ALPHA, LAYERS = 8, 16, 2
BEGIN, END, USER, MODEL = "<|begin|>", "<|end|>", "<|user|>", "<|model|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>"
    "{{ message.content if message.content is string else message.content[0].text }}<|end|>{% endfor %}<|model|>"
)
QUESTIONS = tuple(f"{start} {thing}?" for start in ("What is", "Who made", "Where lies", "Why is there") for thing in (
    "the old river", "this green stone", "a small house", "the winter song", "that long road",
))  # fmt: skip


def build_tokenizer(vocabulary: int = 400) -> Any:
    """Return a byte-level BPE tokenizer that the questions trained, of at most so many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    specials = [BEGIN, END, USER, MODEL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    own.train_from_iterator(QUESTIONS, trainer)
    own.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=BEGIN, eos_token=END, additional_special_tokens=[USER, MODEL], chat_template=TEMPLATE
    )


def build(folder: Path) -> Path:
    """Write the checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    size = 64 * -(-len(tokenizer) // 64)  # a multiple of 64, so that 4-bit blocks are whole
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, initializer_range=0.08,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.25)
        # Answers are made of words: no token that the tokenizer lacks, no control token, no piece of a letter.
        words = [tokenizer.decode([token]) for token in range(4, len(tokenizer))]
        is_word = [False] * 4 + [word.isascii() and word.isprintable() for word in words]
        model.lm_head.weight[~torch.tensor(is_word + [False] * (size - len(is_word)))] = 0
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_adapter(base: Path, folder: Path) -> Path:
    """Write an adapter on every linear of the language model, with an effect."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
    model.save_pretrained(folder)
    return folder
