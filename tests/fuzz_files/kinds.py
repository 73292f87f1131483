"""The kinds of files that are mutated: what a user's command does with each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests import gguf_files, gguf_towers, pico
from tests.adapter_files import TEXT, embedding, q_proj, small_anatomy, write_adapter
from tests.fuzz_files import mutate
from trimtab import api
from trimtab.adapters.adapter import describe, match_adapter, read_adapter
from trimtab.adapters.file import check_vocabulary
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.formats.packed import split_packed
from trimtab.planning import Plan

DEMO = Path(__file__).resolve().parent.parent.parent / "trimtab" / "demo"
Change = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Input:
    """A valid folder, which of its files are changed and how. use: what a command does with the folder."""

    folder: Path
    files: tuple[tuple[str, Change], ...]
    use: Callable[[Path], Any]


def adapters(work: Path) -> list[Input]:
    """Adapters of PEFT's own forms, read, described and matched with a small multimodal model."""
    anatomy = small_anatomy()
    magnitude = {f"base_model.model.{TEXT}.layers.0.self_attn.q_proj.lora_magnitude_vector": (16,)}
    saved = {f"base_model.model.{TEXT}.norm.weight": (16,)}
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (q_proj(), {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.q_proj": 16}}),
        (q_proj() | magnitude, {"target_modules": r".*\.(q|k)_proj", "use_dora": True, "use_rslora": True, "lora_alpha": 8.5}),
        (embedding() | q_proj(1), {"target_modules": ["embed_tokens", "q_proj"], "exclude_modules": "x"}),
        (q_proj() | saved, {"target_modules": "all-linear", "modules_to_save": ["norm"], "ensure_weight_tying": True}),
    ]  # fmt: skip

    def use(folder: Path) -> None:
        file = read_adapter(folder)
        describe(file, None)
        spec = match_adapter(file, anatomy)
        describe(file, spec)
        spec.nbytes("float32")

    folders = [
        write_adapter(work / f"a{place}", shapes, base_model_name_or_path="m", peft_version="0.19.1", **config)
        for place, (shapes, config) in enumerate(forms)
    ]
    files = (("adapter_config.json", mutate.of_text), ("adapter_config.json", mutate.of_text), (
        "adapter_model.safetensors", mutate.of_header,
    ))  # fmt: skip
    return [Input(folder, files, use) for folder in folders]


def plans(work: Path) -> list[Input]:
    """Saved plans, loaded and printed."""

    def use(folder: Path) -> None:
        made = Plan.load(folder / "plan.json")
        str(made)
        made.to_json()

    inputs = []
    for place, (family, options) in enumerate(
        (("llama", {"device": "cpu"}), ("gemma4", {"card": "T4", "quant": "nf4", "batch": 2}))
    ):
        folder = work / f"p{place}"
        api.plan(pico.build(family, work / family), **options).save(_made(folder) / "plan.json")
        inputs.append(Input(folder, (("plan.json", mutate.of_text),), use))
    return inputs


def configs(work: Path) -> list[Input]:
    """Configs of three families, with weights and without, planned for a CPU."""
    machines: dict[Any, Any] = {}

    def use(folder: Path) -> None:
        request = api.LoadRequest(model=str(folder), device="cpu", host_memory_bytes=2**33)  # this process counts in it
        inputs = api.PlanInputs(machines=machines)
        api.plan_request(request, inputs=inputs, is_advised=False)

    changed = (("config.json", mutate.of_text),)
    # Every family reads it alike: the one whose model is made fastest stands for all, in one case of three.
    generation = (("generation_config.json", mutate.of_text),)
    inputs = []
    for family in ("llama", "qwen3_moe", "gemma3"):
        folder = pico.build(family, work / f"{family}-full")
        bare = _made(work / f"{family}-bare")
        for name in ("config.json", "generation_config.json"):
            shutil.copy(folder / name, bare / name)
        inputs += [Input(folder, changed, use), Input(bare, changed, use)]
    return inputs + [Input(work / "llama-bare", generation, use)] * 3


def headers(work: Path) -> list[Input]:
    """Weight files, plain and packed in 4 bits, read as far as a plan reads them."""
    inputs = []
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 16]}
    packed = {"w.weight": ("U8", [64, 1]), "w.weight.absmax": ("F32", [2]), "w.weight.quant_map": ("F32", [16])}
    config = {"model_type": "llama", "num_hidden_layers": 2}
    four = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    raw = json.dumps(state).encode()
    for name, tensors, data, more in (
        ("plain", {"a.weight": ("F32", [4, 4]), "b.bias": ("BF16", [4]), "c": ("I64", [])}, b"", {}),
        ("packed", packed | {"w.weight.quant_state.bitsandbytes__nf4": ("U8", [len(raw)])}, raw, four),
    ):
        folder = _made(work / name)
        (folder / "config.json").write_text(json.dumps(config | more))
        (folder / "model.safetensors").write_bytes(_safetensors(tensors, data))
        inputs.append(Input(folder, (("model.safetensors", mutate.of_header),), lambda path: split_packed(read_checkpoint(path))))
    return inputs


def formats(work: Path) -> list[Input]:
    """Weights in each quantized format of files, with their config, read and dequantized."""
    from safetensors.torch import load_file, save_file

    from tests.golden.formats.make import FOLDER

    def use(folder: Path) -> None:
        import torch

        from trimtab.engine.formats.weights import dequantize, prequantized
        from trimtab.engine.tiers.reader import read_small

        for entry in split_packed(read_checkpoint(folder))[1].values():
            dequantize(prequantized(entry, read_small(entry.read_parts), torch.bfloat16))

    inputs = []
    golden = load_file(FOLDER / "golden.safetensors") | load_file(FOLDER / "small.safetensors")
    named = (json.loads((FOLDER / name).read_text())["configs"] for name in ("cases.json", "small.json"))
    for case, settings in (one for configs in named for one in configs.items()):
        folder = _made(work / case)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
        parts = {name.partition("/")[2]: part for name, part in golden.items() if name.startswith(f"{case}/")}
        save_file({f"x.{name}": part for name, part in parts.items() if "expected" not in name}, folder / "model.safetensors")
        files = (("config.json", mutate.of_text), ("model.safetensors", mutate.of_header))
        inputs.append(Input(folder, files, use))
    return inputs


def indexes(work: Path) -> list[Input]:
    """The index of a checkpoint in shards."""
    folder = pico.build("llama", work / "shards", shards=3)
    return [Input(folder, (("model.safetensors.index.json", mutate.of_text),), read_checkpoint)]


def tokenizers(work: Path) -> list[Input]:
    """The tokenizer and processor of the demo model, and its tokenizer beside an adapter."""
    from trimtab.engine.loader.processor import load_processor

    names = ("tokenizer.json", "tokenizer_config.json", "processor_config.json")
    folder = _made(work / "tokenizer")
    for name in (*names, "config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / "base" / name, folder / name)
    template: tuple[str, Change] = ("chat_template.jinja", mutate.of_bytes)
    beside = _made(work / "beside")
    shutil.copy(folder / "tokenizer.json", beside / "tokenizer.json")
    return [
        Input(folder, (*((name, mutate.of_text) for name in names), template), load_processor),
        Input(beside, (("tokenizer.json", mutate.of_text),), lambda path: check_vocabulary(path, DEMO / "base")),
    ]


def media(work: Path) -> list[Input]:
    """Images and sounds of the demo, as their formats' encoders write them."""
    import numpy as np
    import soundfile
    from PIL import Image

    from trimtab.engine.chat import media as reader

    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    sound = np.sin(np.arange(1600) / 9).astype("float32")
    inputs = []
    for name in ("a.png", "a.jpg", "a.webp"):
        Image.fromarray(pixels).save(_made(work / name.replace(".", "-")) / name)
    for name in ("a.wav", "a.flac", "a.ogg", "a.mp3"):
        soundfile.write(_made(work / name.replace(".", "-")) / name, sound, 16_000)

    def use_image(path: Path) -> None:
        (file,) = path.iterdir()
        reader.picture_bytes(file.read_bytes())
        reader.read_image(file.read_bytes())

    def use_sound(path: Path) -> None:
        (file,) = path.iterdir()
        reader.sound_rate(file.read_bytes())
        reader.read_audio(file.read_bytes())

    for folder in sorted(work.iterdir()):
        (file,) = folder.iterdir()
        use = use_image if file.suffix in (".png", ".jpg", ".webp") else use_sound
        inputs.append(Input(folder, ((file.name, mutate.of_bytes),), use))
    return inputs


def gguf(work: Path) -> list[Input]:
    """GGUF headers of four architectures, with a vocabulary and without, read as far as a checkpoint's folder; LoRAs; and a model
    with its projector file."""

    def use(folder: Path) -> None:
        split_packed(read_checkpoint(folder / "a.gguf"))

    inputs = []
    table = (
        "Q8_0", gguf_files.pack("Q8_0", torch.zeros(pico.VOCABULARY, gguf_files.WIDTH))[0], (pico.VOCABULARY, gguf_files.WIDTH),
    )  # fmt: skip
    for place, family in enumerate(("qwen3", "gemma4", "qwen3_5", "qwen3_moe")):
        keys = gguf_files.FAMILIES[family][2] | (gguf_files.tokenizer_keys() if place == 0 else {})
        norm = ("F32", torch.ones(gguf_files.WIDTH), (gguf_files.WIDTH,))
        tensors = {"token_embd.weight": table, "output_norm.weight": norm}
        if family == "qwen3_moe":
            tensors["blk.0.ffn_up_exps.weight"] = ("Q8_0", torch.zeros(4 * 32 * 34, dtype=torch.uint8), (4, 32, 32))
        gguf_files.write(_made(work / family) / "a.gguf", keys, tensors)
        inputs.append(Input(work / family, (("a.gguf", mutate.of_start),), use))
    pair = {f"blk.0.attn_q.weight.lora_{role}": ("F32", torch.ones(2, 2), (2, 2)) for role in "ab"}
    own = {"general.type": "adapter", "general.architecture": "qwen3", "adapter.type": "lora", "adapter.lora.alpha": 2.0}
    gguf_files.write(_made(work / "lora") / "a.gguf", own, pair)
    gguf_towers.gemma4(pico.build("gemma4", work / "dense"), work / "towers")
    towers = (("config.json", mutate.of_text), ("config.json", mutate.of_text), ("mmproj-model.gguf", mutate.of_start))
    inputs.append(Input(work / "towers", towers, read_checkpoint))
    gguf_towers.qwen3vl(pico.build("qwen3_vl", work / "seen"), work / "qwen" / "pair")
    pair = (("mmproj-model.gguf", mutate.of_start), ("mmproj-model.gguf", mutate.of_start), ("model.gguf", mutate.of_start))
    inputs.append(Input(work / "qwen" / "pair", pair, read_checkpoint))
    return [*inputs, Input(work / "lora", (("a.gguf", mutate.of_start),), lambda folder: read_adapter(folder / "a.gguf"))]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _safetensors(tensors: dict[str, tuple[str, list[int]]], tail: bytes) -> bytes:
    """Return a file of zeros, the last tensor's bytes given."""
    from math import prod

    from trimtab.checkpoint.headers import DTYPES

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPES[dtype][1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(end - len(tail)) + tail


# Kind -> (its inputs, how many cases `make test-all` tries).
KINDS: dict[str, tuple[Callable[[Path], list[Input]], int]] = {
    "adapters": (adapters, 20_000), "plans": (plans, 20_000), "configs": (configs, 20_000), "headers": (headers, 20_000),
    "formats": (formats, 2_000), "indexes": (indexes, 2_000), "tokenizers": (tokenizers, 2_000), "media": (media, 2_000),
    "gguf": (gguf, 2_000),
}  # fmt: skip
