"""How fast are the formats of publishers against bitsandbytes' NF4 of the same model, in one run on one GPU?

    python -m bench.formats --work FOLDER --save bench/results/formats.json [--models e4b,...] [--cases e4b:ct-g32,...] [--layers N]
    python -m bench.formats --work FOLDER --save bench/results/formats.json --loads [--cases ...] [--layers N]

Checkpoints have random weights and real sizes; the decoder's linear layers are packed. An adapter of rank 8 is on. Each case is a
process, and one that has a row in the file is not run again (`--again`: what failed is). A row: `tok_s` behind a prompt
of 512 tokens, `first_ms` of its first token, `weights_gib`, `mode` of the planned step. A short table is printed last.

`--loads`: how long loading takes, transformers' `from_pretrained` of the same files beside it (GGUF by its packed integration, with
the package gguf; compressed-tensors with its own). Each load is a fresh process that has imported the packages of both sides and
opened the GPU; the files were read once before, and the two take turns. `load_s`: of the plan and the load, or of
`from_pretrained`. `answer_s`: of one token behind it. `first_s`: of a side's first load, which may compile kernels: in no median.
`over_s`: seconds within which a load of this side did not end; it is not loaded again.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import DEVICE, empty_cache, environment, parser_of, row_of, save, saved, synchronize, table

PROMPT_TOKENS, ANSWER_TOKENS, REPEATS, CONTEXT = 512, 256, 5, 1024
REPEATS_LOAD = 3
# Standard deviation of 4-bit values that are drawn evenly, less 8; with a zero point drawn evenly too.
_SPREAD, _SPREAD_ZERO = 4.6, 6.5
_SEVENS = 0x77777777  # zero points of 8, each stored less one
Tensors = dict[str, Any]


def _words(rows: int, columns: int) -> Any:
    import torch

    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32, device=DEVICE)


def _scales(rows: int, columns: int, inputs: int, spread: float, dtype: str) -> Any:
    """Return scales with which a weight of this many inputs keeps the size of what it multiplies; half of it, as a layer adds."""
    import torch

    values = torch.rand(rows, columns, device=DEVICE) * 0.2 + 0.9
    return (values * (0.3 / spread / inputs**0.5)).to(getattr(torch, dtype))


def _ct(stem: str, rows: int, columns: int, group: int) -> Tensors:
    import torch

    return {
        f"{stem}weight_packed": _words(rows, columns // 8),
        f"{stem}weight_scale": _scales(rows, columns // group, columns, _SPREAD, "bfloat16"),
        f"{stem}weight_shape": torch.tensor([rows, columns]),
    }


def _awq(stem: str, rows: int, columns: int, group: int) -> Tensors:
    return {
        f"{stem}qweight": _words(columns, rows // 8), f"{stem}qzeros": _words(columns // group, rows // 8),
        f"{stem}scales": _scales(columns // group, rows, columns, _SPREAD_ZERO, "float16"),
    }  # fmt: skip


def _gptq(stem: str, rows: int, columns: int, group: int) -> Tensors:
    import torch

    return {
        f"{stem}qweight": _words(columns // 8, rows),
        f"{stem}qzeros": torch.full((columns // group, rows // 8), _SEVENS, dtype=torch.int32),
        f"{stem}scales": _scales(columns // group, rows, columns, _SPREAD, "float16"),
        f"{stem}g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }  # fmt: skip


def _gptq_act(stem: str, rows: int, columns: int, group: int) -> Tensors:
    """With act-order: inputs have their groups in a random order, one for all layers of as many inputs."""
    import torch

    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return _gptq(stem, rows, columns, group) | {f"{stem}g_idx": (order // group).to(torch.int32)}


def _fp8(stem: str, rows: int, columns: int, group: int) -> Tensors:
    import torch

    values = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) * 64
    return {
        f"{stem}weight": values.clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{stem}weight_scale_inv": _scales(-(-rows // group), -(-columns // group), columns, 64, "bfloat16"),
    }


# As google/gemma-4-E2B-it-qat-mobile-transformers: bits of modules by patterns of their names, 4 elsewhere.
MOBILE_BITS = {
    "^lm_head$": 2, r"language_model\.embed_tokens$": 2, r"language_model\.embed_tokens_per_layer$": 4,
    r"language_model\.layers\.(\d|1[0-4])\.mlp\.gate": 4, r"language_model\.layers\.\d+\.mlp\.": 2,
    r"language_model\.layers\.\d+\.per_layer_": 8, r"language_model\.layers\.\d+\.self_attn\.": 4, "audio_tower": 8,
}  # fmt: skip
MOBILE_PLAIN = (
    "per_layer_model_projection", "model.vision_tower", "model.embed_vision", "model.embed_audio", "relative_k_proj", "output_proj",
)  # fmt: skip
_MOBILE_LINEAR = re.compile(r"(_proj|linear|gate|projection|^lm_head)\.weight$")


def _mobile(name: str, empty: Any, layers: int) -> Tensors:
    """Return the tensors of a weight in the layout of Gemma 4's mobile files, none for one that stays in 16 bits."""
    import torch

    is_table = "embed_tokens" in name
    if empty.dim() != 2 or any(word in name for word in MOBILE_PLAIN) or not (is_table or _MOBILE_LINEAR.search(name)):
        return {}
    stem, (rows, columns) = name.removesuffix(".weight"), empty.shape
    bits = next((bits for pattern, bits in MOBILE_BITS.items() if re.search(pattern, stem)), 4)
    groups = layers if stem.endswith("embed_tokens_per_layer") else 1
    data = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, device=DEVICE)
    size, spread = 0.02 if is_table else 0.3 / columns**0.5, ((4**bits - 1) / 12) ** 0.5
    scale = (torch.rand(rows, groups, device=DEVICE) * 0.2 + 0.9) * (size / spread)
    if is_table:
        return {f"{stem}.embedding_quantized": data, f"{stem}.embedding_scale": scale}
    return {
        name: data.view(torch.int8) if bits == 8 else data, f"{stem}.weight_scale": scale,
        f"{stem}.input_activation_scale": torch.tensor(0.04), f"{stem}.output_activation_scale": torch.tensor(0.02),
    }  # fmt: skip


def _int4_scheme(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


# name -> (quantization_config, what makes the tensors of a weight, group, the model's dtype)
FORMS: dict[str, tuple[dict[str, Any], Callable[[str, int, int, int], Tensors], int, str]] = {
    "ct-g32": (_int4_scheme(32), _ct, 32, "bfloat16"),
    "ct-g128": (_int4_scheme(128), _ct, 128, "bfloat16"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, _awq, 128, "float16"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, _gptq, 128, "float16"),
    "gptq-act": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}, _gptq_act, 128, "float16"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, _fp8, 128, "bfloat16"),
}  # fmt: skip
# Of a case that has less of the GPU than all of it; what is not resident there is chosen by the plan.
BUDGETS = {"e2b:mobile": "2GiB", "e4b:mobile": "3.25GiB"}
CASES = {
    "e2b": ("mobile",), "e4b": ("nf4-dq", "ct-g32", "ct-g128", "fp8", "mobile"),
    "qwen3-8b": ("nf4-dq", "ct-g128", "awq", "gptq", "gptq-act", "fp8", "q4_k_m"),
}  # fmt: skip


LOADS = ("qwen3-8b:q4_k_m", "e4b:ct-g32")


# Checkpoints ----------------------------------------------------------------------------------------------------------


def config_of(size: str, layers: int | None) -> Any:
    """Return the config of a model of real size, or of its first layers."""
    from bench import checkpoints

    config = checkpoints.config_of(size)
    if layers is not None:
        config = checkpoints.first_layers(config, layers)
    text = config.get_text_config()
    config.eos_token_id = text.eos_token_id = None  # random weights may draw an end token at once
    return config


def folder_of(size: str, form: str, work: Path, layers: int | None) -> Path:
    return work / f"{size}-{form}-{layers or 'all'}"


def write(size: str, form: str, folder: Path, layers: int | None) -> Path:
    """Write a checkpoint of this form, and its adapter."""
    from bench import checkpoints

    if (folder / "done").exists():
        return folder
    config = config_of(size, layers)
    if form == "q4_k_m":
        from bench import gguf

        gguf.write(config, folder / "model.gguf", device=DEVICE)
        config.architectures = [checkpoints.CLASSES[size]]
        config.save_pretrained(folder / "config")
    elif form == "mobile":
        text = config.get_text_config()
        config.tie_word_embeddings = text.tie_word_embeddings = False
        checkpoints.write_checkpoint(
            size, folder, config=config, made_of=lambda name, empty: _mobile(name, empty, text.num_hidden_layers), device=DEVICE
        )
        settings = {
            "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True, "modules_to_not_convert": list(MOBILE_PLAIN),
            "module_quant_configs": {pattern: {"num_bits": bits} for pattern, bits in MOBILE_BITS.items()},
        }  # fmt: skip
        file = folder / "config.json"
        whole = json.loads(file.read_text(encoding="utf-8")) | {"quantization_config": settings}
        file.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    elif form == "nf4-dq":
        checkpoints.write_checkpoint(size, folder, config=config, device=DEVICE, packed=True)
    else:
        settings, make, group, dtype = FORMS[form]

        def packed(name: str, empty: Any) -> Tensors:
            if empty.dim() != 2 or not re.search(checkpoints.PACKED, name):
                return {}
            return make(name.removesuffix("weight"), *empty.shape, group)

        checkpoints.write_checkpoint(size, folder, config=config, made_of=packed, device=DEVICE)
        file = folder / "config.json"
        whole = json.loads(file.read_text(encoding="utf-8")) | {"quantization_config": settings, "dtype": dtype}
        file.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    checkpoints.write_adapter(folder / "config" if form == "q4_k_m" else folder, folder / "r8", 8, size=size)
    (folder / "done").touch()
    return folder


# One case -------------------------------------------------------------------------------------------------------------


def run(size: str, form: str, work: Path, layers: int | None, *, tunes: bool) -> dict[str, Any]:
    import torch

    import trimtab
    from bench.checkpoints import TINY, text_inputs

    folder = write(size, form, folder_of(size, form, work, layers), layers)
    empty_cache()
    prompt_tokens, answer_tokens, repeats = (48, 8, 1) if size.endswith(TINY) else (PROMPT_TOKENS, ANSWER_TOKENS, REPEATS)
    start = time.perf_counter()
    model_path = folder / "model.gguf" if form == "q4_k_m" else folder
    budget = BUDGETS.get(f"{size}:{form}")
    placed: dict[str, Any] = {"place": {"*": "resident"}} if budget is None or DEVICE == "cpu" else {"gpu_memory": budget}
    plan = trimtab.plan(model_path, adapters={"r8": folder / "r8"}, context=CONTEXT, device=DEVICE, **placed)
    row: dict[str, Any] = {"model": size, "form": form, "layers": layers, "quant": plan.request.quant}
    row |= {
        "mode": plan.execution.step.mode,
        "chunks": plan.execution.prompt.mode,
        "planned_tok_s": round(plan.execution.tokens_per_s, 1),
    }
    with trimtab.load(plan) as model:
        row["load_s"] = round(time.perf_counter() - start, 1)
        if tunes:
            row["tuned"] = _tuned(model)
        numbers = itertools.count(3)

        def answer(count: int) -> float:
            # No prompt comes twice: its keys and values might be kept.
            inputs = text_inputs(model.hf_model.config, prompt_tokens, device=DEVICE, seed=next(numbers))
            prompt = inputs["input_ids"][0].tolist()
            synchronize()
            began = time.perf_counter()
            given = model.answer_inputs(model.prepare(prompt), trimtab.GenerateRequest(max_new_tokens=count), adapter="r8")
            synchronize()
            assert len(given.token_ids) == count
            return time.perf_counter() - began

        answer(answer_tokens)
        first = statistics.median(answer(1) for _ in range(repeats))
        whole = statistics.median(answer(1 + answer_tokens) for _ in range(repeats))
        row |= {
            "tok_s": round(answer_tokens / (whole - first), 1), "first_ms": round(first * 1000, 1),
            "weights_gib": round(plan.gpu["weights"] / 2**30, 2), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "notes": sorted({f"{one.what}: {one.why}" for one in model.fallbacks}),
        }  # fmt: skip
    return row


def _tuned(model: Any) -> str:
    from trimtab.engine.tune import tune_model

    try:
        return f"{tune_model(model, rows=1)[0].products} products"
    except Exception as exc:  # the row says so, and is measured without
        return f"{type(exc).__name__}: {exc}"


# Loading --------------------------------------------------------------------------------------------------------------


def _import_all(form: str) -> None:
    """Import what either side imports as it loads, so that the seconds of neither have it."""
    names = ["trimtab.api", "trimtab.engine.model", "trimtab.engine.loader.load", "bitsandbytes", "accelerate"]
    names += [
        "trimtab.machine.machine_cache",
        "platformdirs",
        "transformers.integrations.bitsandbytes",
        "transformers.integrations.gguf",
    ]
    for name in [*names, "transformers.modeling_gguf_pytorch_utils", "gguf" if form == "q4_k_m" else "compressed_tensors"]:
        if importlib.util.find_spec(name):  # the row of a side that lacks its package says so
            importlib.import_module(name)


def load_once(size: str, form: str, work: Path, layers: int | None, side: str) -> dict[str, Any]:
    """Return the seconds of one load and of one token behind it. side: "trimtab" or "stock"."""
    import torch
    import transformers

    import trimtab
    from bench.checkpoints import CLASSES, text_inputs

    folder, is_gguf = folder_of(size, form, work, layers), form == "q4_k_m"
    config = config_of(size, layers)
    inputs = text_inputs(config, 16, device=DEVICE)
    _import_all(form)
    kind = getattr(transformers, CLASSES[size])
    synchronize()
    start = time.perf_counter()
    if side == "stock":
        given: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": DEVICE}
        if is_gguf:
            given |= {"gguf_file": "model.gguf", "quantization_config": transformers.GgufConfig()}
        model = kind.from_pretrained(folder, **given)
        layer = type(model.get_decoder().layers[0].mlp.gate_proj).__name__
    else:
        path = folder / "model.gguf" if is_gguf else folder
        plan = trimtab.plan(path, context=CONTEXT, device=DEVICE, place={"*": "resident"})
        model, layer = trimtab.load(plan), plan.request.quant
    synchronize()
    loaded = time.perf_counter()
    if side == "stock":
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    else:
        model.answer_inputs(model.prepare(inputs["input_ids"][0].tolist()), trimtab.GenerateRequest(max_new_tokens=1))
    synchronize()
    return {"load_s": round(loaded - start, 2), "answer_s": round(time.perf_counter() - loaded, 2), "layer": layer}


def loads(name: str, given: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """Return the row of loads of a case, each side in turn, None where the time that is left cut it. end: of `time.monotonic`."""
    size, form = name.split(":")
    folder = write(size, form, folder_of(size, form, given.work, given.layers), given.layers)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        with open(file, "rb") as handle:
            while handle.read(2**24):
                pass
    row: dict[str, Any] = {
        "model": size,
        "form": form,
        "layers": given.layers,
        "gb": round(sum(f.stat().st_size for f in files) / 1e9, 2),
    }
    command = ["bench.formats", "--work", str(given.work), "--one", name]
    command += [] if given.layers is None else ["--layers", str(given.layers)]
    found: dict[str, list[dict[str, Any]]] = {"trimtab": [], "stock": []}
    over: dict[str, float] = {}  # side -> the seconds that one load did not end within; no further one is made
    try:
        for side in ("trimtab", "stock") * (1 + REPEATS_LOAD):
            if side in over:
                continue
            made = row_of([*command, "--side", side], timeout_s=given.timeout_s, left_s=end - time.monotonic())
            if made is None:
                return None
            if "over_s" in made:
                over[side] = made["over_s"]
            elif "error" in made:
                row["error"] = f"{side}: {made['error']}"
                break
            else:
                found[side].append(made)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for side, times in found.items():
        if side in over:
            row[side] = {"over_s": over[side]}
        elif times:
            first, *times = times
            row[side] = {"first_s": first["load_s"], "layer": first["layer"]}
            row[side] |= {key: [one[key] for one in times] for key in ("load_s", "answer_s")}
    if "error" not in row and not over:
        ours, stock = (statistics.median(row[side]["load_s"]) for side in ("trimtab", "stock"))
        row["of_stock"] = round(ours / stock, 2)
    print(json.dumps(row), flush=True)
    return row


# All of them ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--cases", default="", help="MODEL:FORM,...; all of the models by default")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there, up to 12 GB each")
    parser.add_argument(
        "--tune", action="store_true", help="time the launch configurations of one row first, as `trimtab tune` does"
    )
    parser.add_argument("--timeout-s", type=float, default=400)
    parser.add_argument("--total-s", type=float, default=36000, help="no case begins when a minute of this is left")
    parser.add_argument("--loads", action="store_true", help="time loading, stock beside it, not tokens")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        size, form = given.one.split(":")
        if given.side:
            print("ROW " + json.dumps(load_once(size, form, given.work, given.layers, given.side)), flush=True)
            return
        print("ROW " + json.dumps(run(size, form, given.work, given.layers, tunes=given.tune)), flush=True)
        return
    end = time.monotonic() + given.total_s
    whole = saved(given.save)
    # Loads are of another call than rates, maybe of another machine: each has its environment.
    part = whole.setdefault("loads", {}) if given.loads else whole

    rows = [row for row in part.get("rows", []) if not (given.again and "error" in row)]
    every = LOADS if given.loads else [f"{size}:{form}" for size in given.models.split(",") for form in CASES[size]]
    wanted = given.cases.split(",") if given.cases else every
    left_out: list[str] = []
    for name in wanted:
        if any((f"{row['model']}:{row['form']}", row["layers"]) == (name, given.layers) for row in rows):
            continue
        left_s = end - time.monotonic()
        row = None if left_s < 60 else (loads(name, given, end - 10) if given.loads else _case(name, given, left_s - 10))
        if row is None:
            left_out.append(name)
            continue
        rows.append(row)
        part.update({"environment": environment(), "rows": rows})
        save(given.save, whole)
    if not given.loads:
        print(table(against_nf4(rows), ("model", "form", "mode", "tok_s", "of_nf4", "first_ms", "weights_gib", "error")))
    if left_out:
        raise SystemExit(f"no time left for {', '.join(left_out)}")
    if failed := [name for name in wanted if any("error" in row and f"{row['model']}:{row['form']}" == name for row in rows)]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _case(name: str, given: argparse.Namespace, left_s: float) -> dict[str, Any] | None:
    """Return the row of a case, None where the time that is left cut it."""
    command = ["bench.formats", "--work", str(given.work), "--one", name]
    command += ["--tune"] if given.tune else []
    command += [] if given.layers is None else ["--layers", str(given.layers)]
    size, form = name.split(":")
    try:
        row = row_of(command, timeout_s=given.timeout_s, left_s=left_s)
    finally:
        if not given.keep:
            shutil.rmtree(folder_of(size, form, given.work, given.layers), ignore_errors=True)
    if row is None:
        return None
    print(json.dumps(row), flush=True)
    return {"model": size, "form": form, "layers": given.layers} | row


def against_nf4(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with their rates over those of NF4 of the same model."""
    base = {(row["model"], row["layers"]): row["tok_s"] for row in rows if row["form"] == "nf4-dq" and "tok_s" in row}
    of = ((row, base.get((row["model"], row["layers"]))) for row in rows)
    return [row | ({"of_nf4": round(row["tok_s"] / nf4, 2)} if nf4 and "tok_s" in row else {}) for row, nf4 in of]


if __name__ == "__main__":
    main()
