"""Models as rows of an anatomy, written by hand: Gemma 4 E2B and E4B at full size, and small ones for searching.

They need no transformers: what a plan is tested on must not depend on what reads the model.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.checkpoint.anatomy import Anatomy, Kind, KVLayer, ModuleRow, Part, TensorRow

DTYPE = "bfloat16"


def tensor(path: str, *shape: int, is_buffer: bool = False, tied_to: str | None = None, dtype: str = DTYPE) -> TensorRow:
    return TensorRow(path, shape, dtype, is_buffer, () if tied_to else (path,), tied_to)


def linear(path: str, out: int, inside: int, *, block: str, part: Part, quantized: bool = True) -> ModuleRow:
    return ModuleRow(
        path, "Linear", part, "linear", block, (tensor(f"{path}.weight", out, inside),), quantized=quantized,
        why_unquantized="" if quantized else "keep_unquantized",
    )  # fmt: skip


def other(path: str, class_name: str, tensors: tuple[TensorRow, ...], *, block: str, part: Part, **extra) -> ModuleRow:
    kind: Kind = extra.pop("kind", "other")
    return ModuleRow(path, class_name, part, kind, block, tensors, **extra)


def norm(path: str, width: int, *, block: str, part: Part) -> ModuleRow:
    return other(path, "RMSNorm", (tensor(f"{path}.weight", width),), block=block, part=part)


def clippable(path: str, out: int, inside: int, *, block: str, part: Part, quantized: bool) -> list[ModuleRow]:
    bounds = tuple(tensor(f"{path}.{name}", is_buffer=True) for name in ("input_min", "input_max", "output_min", "output_max"))
    wrapper = other(path, "Gemma4ClippableLinear", bounds, block=block, part=part, wraps=f"{path}.linear")
    return [wrapper, linear(f"{path}.linear", out, inside, block=block, part=part, quantized=quantized)]


def _text_layer(size: dict, number: int, quantized: bool) -> list[ModuleRow]:
    path, hidden, part = f"model.language_model.layers.{number}", size["hidden"], "language"
    is_full = (number + 1) % size["full_every"] == 0
    is_shared = number >= size["layers"] - size["shared"]
    head = 512 if is_full else 256
    mlp = size["mlp"] * (2 if is_shared and size["double"] else 1)
    query, key = 8 * head, size["kv_heads"] * head
    where = {"block": path, "part": part, "quantized": quantized}
    rows = [
        other(path, "Gemma4TextDecoderLayer", (tensor(f"{path}.layer_scalar", 1, is_buffer=True),), block=path, part=part),
        linear(f"{path}.self_attn.q_proj", query, hidden, **where), linear(f"{path}.self_attn.o_proj", hidden, query, **where),
        linear(f"{path}.mlp.gate_proj", mlp, hidden, **where), linear(f"{path}.mlp.up_proj", mlp, hidden, **where),
        linear(f"{path}.mlp.down_proj", hidden, mlp, **where), linear(f"{path}.per_layer_input_gate", 256, hidden, **where),
        linear(f"{path}.per_layer_projection", hidden, 256, **where), norm(f"{path}.self_attn.q_norm", head, block=path, part=part),
    ]  # fmt: skip
    if not is_shared:
        rows += [linear(f"{path}.self_attn.{name}_proj", key, hidden, **where) for name in "kv"]
        rows.append(norm(f"{path}.self_attn.k_norm", head, block=path, part=part))
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    rows += [norm(f"{path}.{name}_layernorm", hidden, block=path, part=part) for name in norms]
    return [*rows, norm(f"{path}.post_per_layer_input_norm", hidden, block=path, part=part)]


def _vision(hidden: int, quantized: bool) -> list[ModuleRow]:
    root, width, mlp = "model.vision_tower", 768, 3072
    embedder = f"{root}.patch_embedder"
    table = (tensor(f"{embedder}.position_embedding_table", 2, 10240, width),)
    rows = [
        other(embedder, "Gemma4VisionPatchEmbedder", table, block=root, part="vision"),
        linear(f"{embedder}.input_proj", width, 768, block=root, part="vision", quantized=quantized),
    ]
    for number in range(16):
        path = f"{root}.encoder.layers.{number}"
        where = {"block": path, "part": "vision", "quantized": quantized}
        for name in "qkvo":
            rows += clippable(f"{path}.self_attn.{name}_proj", width, width, **where)
        for name in ("gate", "up"):
            rows += clippable(f"{path}.mlp.{name}_proj", mlp, width, **where)
        rows += clippable(f"{path}.mlp.down_proj", width, mlp, **where)
        rows += [norm(f"{path}.norm_{i}", width, block=path, part="vision") for i in range(4)]
    projection = "model.embed_vision.embedding_projection"
    return [*rows, linear(projection, hidden, width, block="model.embed_vision", part="connector", quantized=quantized)]


def _audio(hidden: int, quantized: bool) -> list[ModuleRow]:
    root, width = "model.audio_tower", 1024
    first = f"{root}.subsample_conv_projection"
    rows = [
        other(f"{first}.layer0.conv", "Conv2d", (tensor(f"{first}.layer0.conv.weight", 128, 1, 3, 3),), block=root, part="audio"),
        other(f"{first}.layer1.conv", "Conv2d", (tensor(f"{first}.layer1.conv.weight", 32, 128, 3, 3),), block=root, part="audio"),
        linear(f"{first}.input_proj_linear", width, 1024, block=root, part="audio", quantized=quantized),
    ]
    for number in range(12):
        path = f"{root}.layers.{number}"
        where = {"block": path, "part": "audio", "quantized": quantized}
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            rows += clippable(f"{path}.self_attn.{name}", width, width, **where)
        rows.append(linear(f"{path}.self_attn.relative_k_proj", width, width, **where))
        for name in ("feed_forward1", "feed_forward2"):
            rows += clippable(f"{path}.{name}.ffw_layer_1", 4 * width, width, **where)
            rows += clippable(f"{path}.{name}.ffw_layer_2", width, 4 * width, **where)
        rows += clippable(f"{path}.lconv1d.linear_start", 2 * width, width, **where)
        rows += clippable(f"{path}.lconv1d.linear_end", width, width, **where)
        conv = tensor(f"{path}.lconv1d.depthwise_conv1d.weight", width, 1, 5)
        rows.append(other(f"{path}.lconv1d.depthwise_conv1d", "Conv1d", (conv,), block=path, part="audio"))
        rows += [norm(f"{path}.norm_{i}", width, block=path, part="audio") for i in range(8)]
    rows.append(linear(f"{root}.output_proj", 1536, width, block=root, part="audio", quantized=quantized))
    projection = "model.embed_audio.embedding_projection"
    return [*rows, linear(projection, hidden, 1536, block="model.embed_audio", part="connector", quantized=quantized)]


SIZES = {
    "E2B": {"layers": 35, "hidden": 1536, "kv_heads": 1, "mlp": 6144, "double": True, "shared": 20, "full_every": 5},
    "E4B": {"layers": 42, "hidden": 2560, "kv_heads": 2, "mlp": 10240, "double": False, "shared": 18, "full_every": 6},
}


def e_series(name: str = "E2B", *, quantized: bool = True, towers: bool = True) -> Anatomy:
    """Return Gemma 4 E2B or E4B at full size, with both towers."""
    size = SIZES[name]
    hidden, layers, vocabulary, root = size["hidden"], size["layers"], 262144, "model.language_model"
    embed, ple = f"{root}.embed_tokens", f"{root}.embed_tokens_per_layer"
    scale = tensor(f"{embed}.embed_scale", is_buffer=True)
    rows = [
        other(
            embed, "Gemma4TextScaledWordEmbedding", (tensor(f"{embed}.weight", vocabulary, hidden), scale), block=root,
            part="language", kind="embedding",
        )
    ]  # fmt: skip
    for number in range(layers):
        rows += _text_layer(size, number, quantized)
    rows += [
        norm(f"{root}.norm", hidden, block=root, part="language"),
        other(
            ple, "Gemma4TextScaledWordEmbedding", (tensor(f"{ple}.weight", vocabulary, layers * 256),), block=ple, part="table",
            kind="embedding", gather_only=True,
        ),
        linear(f"{root}.per_layer_model_projection", layers * 256, hidden, block=root, part="language", quantized=quantized),
        norm(f"{root}.per_layer_projection_norm", 256, block=root, part="language"),
    ]  # fmt: skip
    if towers:
        rows += [*_vision(hidden, quantized), *_audio(hidden, quantized)]
    head = tensor("lm_head.weight", vocabulary, hidden, tied_to=f"{embed}.weight")
    rows.append(ModuleRow("lm_head", "Linear", "head", "linear", "lm_head", (head,), why_unquantized="tied to the embedding"))
    return Anatomy(
        model_class="Gemma4ForConditionalGeneration", model_type="gemma4", dtype=DTYPE, rows=tuple(rows),
        kv_layers=tuple(_kv_layers(size)), hidden_size=hidden, vocab_size=vocabulary, images_look_ahead=False,
    )  # fmt: skip


def _kv_layers(size: dict) -> list[KVLayer]:
    storing, found = size["layers"] - size["shared"], []
    for number in range(size["layers"]):
        is_full = (number + 1) % size["full_every"] == 0
        same = [n for n in range(storing) if ((n + 1) % size["full_every"] == 0) == is_full]
        shares = same[-1] if number >= storing else None
        found.append(KVLayer(number, size["kv_heads"], 512 if is_full else 256, None if is_full else 512, shares))
    return found


def with_int8_head(anatomy: Anatomy) -> Anatomy:
    """Return the anatomy with the head as a matrix of its own in 8 bits, and the table it was tied to free to leave."""
    table = "model.language_model.embed_tokens"
    is_tied = any(row.weight is not None and row.weight.tied_to for row in anatomy.rows if row.part == "head")
    rows: list[ModuleRow] = []
    for row in anatomy.rows:
        if row.part == "head":
            tied = {"tied_to": None, "copy_of": f"{table}.weight"} if is_tied else {}
            row = replace(row, tensors=(replace(row.weight, **tied),), is_head8=True)
        elif is_tied and row.module_path == table:
            row = replace(row, gather_only=True, part="table", block=table)
        rows.append(row)
    return replace(anatomy, rows=tuple(rows))


def qwen3_8b() -> Anatomy:
    """Return a text model of Qwen3-8B's sizes, whose head is a matrix of its own."""
    hidden, vocabulary, root = 4096, 151936, "model"
    rows = [
        other(
            f"{root}.embed_tokens", "Embedding", (tensor(f"{root}.embed_tokens.weight", vocabulary, hidden),),
            block=f"{root}.embed_tokens", part="table", kind="embedding", gather_only=True,
        )
    ]  # fmt: skip
    for number in range(36):
        path = f"{root}.layers.{number}"
        sizes = {
            "self_attn.q_proj": (4096, hidden), "self_attn.k_proj": (1024, hidden), "self_attn.v_proj": (1024, hidden),
            "self_attn.o_proj": (hidden, 4096), "mlp.gate_proj": (12288, hidden), "mlp.up_proj": (12288, hidden),
            "mlp.down_proj": (hidden, 12288),
        }  # fmt: skip
        rows += [linear(f"{path}.{name}", *shape, block=path, part="language", quantized=True) for name, shape in sizes.items()]
        rows += [norm(f"{path}.{name}", hidden, block=path, part="language") for name in ("norm_1", "norm_2")]
    rows.append(norm(f"{root}.norm", hidden, block=root, part="language"))
    head = tensor("lm_head.weight", vocabulary, hidden)
    rows.append(ModuleRow("lm_head", "Linear", "head", "linear", "lm_head", (head,), why_unquantized="the output layer"))
    kv = tuple(KVLayer(number, 8, 128, None, None) for number in range(36))
    return Anatomy("Qwen3ForCausalLM", "qwen3", DTYPE, tuple(rows), kv, hidden, vocabulary)


def gemma_26b(made: str | None = "nf4-dq") -> Anatomy:
    """Return Gemma 4 26B-A4B's text model: 128 experts in each of 30 layers, of which a token uses 8. made: their format."""
    hidden, vocabulary, root, inner = 2816, 262144, "model.language_model", 704
    embed = f"{root}.embed_tokens"
    rows = [other(embed, "Gemma4TextScaledWordEmbedding", (tensor(f"{embed}.weight", vocabulary, hidden),), block=root,
                  part="language", kind="embedding")]  # fmt: skip
    kv = []
    for number in range(30):
        path, is_full = f"{root}.layers.{number}", (number + 1) % 6 == 0
        head, keys = (512, 2) if is_full else (256, 8)
        kv.append(KVLayer(number, keys, head, None if is_full else 1024, None))
        sizes = {
            "self_attn.q_proj": (16 * head, hidden), "self_attn.k_proj": (keys * head, hidden),
            "self_attn.o_proj": (hidden, 16 * head), "mlp.gate_proj": (2112, hidden), "mlp.up_proj": (2112, hidden),
            "mlp.down_proj": (hidden, 2112),
        }  # fmt: skip
        sizes |= {} if is_full else {"self_attn.v_proj": (keys * head, hidden)}
        rows += [linear(f"{path}.{name}", *shape, block=path, part="language", quantized=True) for name, shape in sizes.items()]
        experts = f"{path}.experts"
        stacks = (tensor(f"{experts}.gate_up_proj", 128, 2 * inner, hidden), tensor(f"{experts}.down_proj", 128, hidden, inner))
        rows.append(other(experts, "Gemma4TextExperts", stacks, block=path, part="language", kind="experts", quantized=bool(made),
                          takes_lora=True, made=made, chosen=8))  # fmt: skip
        rows += [norm(f"{path}.norm_{i}", hidden, block=path, part="language") for i in range(7)]
    head = tensor("lm_head.weight", vocabulary, hidden, tied_to=f"{embed}.weight")
    rows.append(ModuleRow("lm_head", "Linear", "head", "linear", "lm_head", (head,), why_unquantized="tied to the embedding"))
    return Anatomy(
        "Gemma4ForConditionalGeneration", "gemma4", DTYPE, tuple(rows), tuple(kv), hidden, vocabulary, images_look_ahead=False
    )


def small(
    layers: list[tuple[int, int]] = ((64, 64), (64, 64)),
    *,
    vision: list[tuple[int, int]] = (),
    table: tuple[int, int] | None = None,
    head_tied: bool = False,
    experts: int = 0,
    vocabulary: int = 1000,
    hidden: int = 64,
    quantized: bool = False,
) -> Anatomy:
    """Return a little model: one linear a layer, of the given shapes; maybe a table, maybe experts."""
    root = "model.language_model"
    embed = f"{root}.embed_tokens"
    rows = [
        other(embed, "Embedding", (tensor(f"{embed}.weight", vocabulary, hidden),), block=root, part="language", kind="embedding")
    ]
    for number, (out, inside) in enumerate(layers):
        path = f"{root}.layers.{number}"
        rows.append(linear(f"{path}.mlp.up_proj", out, inside, block=path, part="language", quantized=quantized))
        rows.append(norm(f"{path}.norm", hidden, block=path, part="language"))
        if experts:
            weights = (
                tensor(f"{path}.experts.gate_up_proj", experts, 2 * out, inside),
                tensor(f"{path}.experts.down_proj", experts, inside, out),
            )
            rows.append(other(f"{path}.experts", "Experts", weights, block=path, part="language", kind="experts"))
    if table:
        path = f"{root}.embed_tokens_per_layer"
        rows.append(other(
            path, "Embedding", (tensor(f"{path}.weight", *table),), block=path, part="table", kind="embedding", gather_only=True,
        ))  # fmt: skip
    for number, (out, inside) in enumerate(vision):
        path = f"model.vision_tower.layers.{number}"
        rows.append(linear(f"{path}.mlp.up_proj", out, inside, block=path, part="vision", quantized=quantized))
    tied = f"{embed}.weight" if head_tied else None
    head = tensor("lm_head.weight", vocabulary, hidden, tied_to=tied)
    rows.append(ModuleRow("lm_head", "Linear", "head", "linear", "lm_head", (head,), why_unquantized="the output layer"))
    kv = tuple(KVLayer(number, 1, 16, None, None) for number in range(len(layers)))
    return Anatomy("Small", "small", DTYPE, tuple(rows), kv, hidden, vocabulary)
