"""The field's first report, run again: its script on a split NF4 base, with stock PEFT and with one line changed.

    python -m bench.bridge --work FOLDER --save bench/results/bridge.json [--size e4b|e2b|pico] [--card-gib 14.5625]

Every case runs in its own process on the same random checkpoint and multimodal adapter. The base is loaded as the report
did: NF4 with double quantization, towers on the CPU, the rest by a "" entry, and a key that names nothing. Under
pressure a block of GPU memory is held, so that the card has as much as the field's T4. The reference is stock PEFT on the
unsplit base whose towers are left unquantized too. `--size pico` imitates all of it on the CPU, without pressure.
A second run with other library versions adds its rows to the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import generated, parser_of, row_of, save, saved
from bench.memory import prepared_apart

T4_GIB = 14.5625
CASES: tuple[dict[str, Any], ...] = (
    {"name": "reference", "adapter_line": "stock", "pressure": False},
    {"name": "stock, room to spare", "adapter_line": "stock", "pressure": False},
    {"name": "stock, 14.6 GiB card", "adapter_line": "stock", "pressure": True},
    {"name": "bridge, 14.6 GiB card", "adapter_line": "bridge", "pressure": True},
)
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")


# Inside a case's process ----------------------------------------------------------------------------------------------


def run_case(case: dict[str, Any], work: Path, size: str) -> dict[str, Any]:
    """Return one row; an exception of the stack is a result, with the stage and the library frame it left."""
    import torch

    pico = size == "pico"
    row: dict[str, Any] = {"stage": "base"}
    ballast = None
    try:
        if case["pressure"] and not pico:
            free, _ = torch.cuda.mem_get_info()
            ballast = torch.empty(max(0, free - int(case["card_gib"] * 2**30)), dtype=torch.uint8, device="cuda")
        held = 0 if ballast is None else ballast.numel()
        started = time.perf_counter()
        base = load_base(work, size, case)
        row |= {"base_s": seconds(started), "map_asked": shown(base), "base_bytes": gpu_bytes(pico) - held}
        if not pico:
            row["free_bytes"] = torch.cuda.mem_get_info()[0]
            torch.cuda.reset_peak_memory_stats()
        row["stage"], started = "adapter", time.perf_counter()
        model = load_adapter(case["adapter_line"], base, work / f"{size}-r8")
        row |= {"adapter_s": seconds(started), "map_after": shown(model), "model_bytes": gpu_bytes(pico) - held}
        if pico:
            from tests import stock

            stock.without_cpu_repacking(model)
        row |= {"placement_kept": row["map_after"] == row["map_asked"], "adapter_bytes": lora_bytes(model)}
        row["stage"] = "first forward"
        row["modes"] = {kind: answer(model, work, size, case, kind) for kind in ("text", "image and audio")}
        row["stage"] = "generate"
        row["tokens"] = generate(model, size)
        row["stage"] = "done"
    except Exception as exc:
        row["exception"] = {"type": type(exc).__name__, "message": str(exc)[:300], "frame": library_frame(exc)}
    if not pico:
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated() - (0 if ballast is None else ballast.numel())
    return row


def load_base(work: Path, size: str, case: dict[str, Any]) -> Any:
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    gpu: Any = torch.device("cpu") if size == "pico" else 0
    towers = ("model.vision_tower", "model.multi_modal_projector", "model.audio_tower")
    device_map: dict[str, Any] = dict.fromkeys(towers, "cpu") | {"": gpu}
    skipped = None
    if case["name"] == "reference":
        device_map, skipped = {"": gpu}, ["model.vision_tower", "model.audio_tower", "lm_head"]
    return Gemma4ForConditionalGeneration.from_pretrained(
        work / size, dtype=torch.bfloat16, device_map=device_map, low_cpu_mem_usage=False,
        offload_folder=str(work / "offload"),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_enable_fp32_cpu_offload=True,
            llm_int8_skip_modules=skipped,
        ),
    ).eval()  # fmt: skip


def load_adapter(line: str, base: Any, adapter: Path) -> Any:
    """Return the model of the one line that differs."""
    if line == "bridge":
        import trimtab.bridge

        return trimtab.bridge.load_peft(base, adapter)
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(adapter)).eval()


def inputs_of(size: str, config: Any, kind: str) -> dict[str, Any]:
    if size == "pico":
        from tests import pico

        found = pico.inputs("gemma4", config)
        found["input_ids"] = found["input_ids"] if kind != "text" else found["input_ids"].clamp(max=299)
        return found if kind != "text" else {name: found[name] for name in ("input_ids", "attention_mask")}
    from bench.checkpoints import media_inputs, text_inputs

    return text_inputs(config, 256, device="cuda") if kind == "text" else media_inputs(config, device="cuda")


def answer(model: Any, work: Path, size: str, case: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return what the last position says: against the reference's logits, which the first case leaves in a file."""
    import torch
    from safetensors.torch import load_file, save_file

    with torch.no_grad():
        logits = model(**inputs_of(size, model.config, kind), use_cache=True).logits[:, -1].float().cpu()
    name = f"logits-{kind.replace(' ', '-')}.safetensors"
    found: dict[str, Any] = {"ok": bool(torch.isfinite(logits).all())}
    if case["name"] == "reference":
        save_file({"logits": logits.contiguous()}, work / name)
    elif (work / name).exists():
        expected = load_file(work / name)["logits"]
        found |= {
            "max_abs": round(float((logits - expected).abs().max()), 5), "same_token": bool(
                logits.argmax() == expected.argmax()
            ),
        }  # fmt: skip
    return found


def generate(model: Any, size: str) -> list[int]:
    given = inputs_of(size, model.config, "text")
    return [int(token) for token in generated(model, given, 8)[0, given["input_ids"].shape[1] :]]


def gpu_bytes(pico: bool) -> int:
    import torch

    return 0 if pico else int(torch.cuda.memory_allocated())


def lora_bytes(model: Any) -> int:
    return sum(value.nbytes for name, value in model.named_parameters() if "lora_" in name)


def shown(model: Any) -> dict[str, str]:
    return {key: str(value) for key, value in getattr(model, "hf_device_map", {"": "one device"}).items()}


def seconds(started: float) -> float:
    return round(time.perf_counter() - started, 2)


def library_frame(exc: BaseException) -> str:
    """Return "accelerate/hooks.py:371 pre_forward" of the last frame inside a package, without a machine's path."""
    import traceback

    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        parts = Path(frame.filename).parts
        for package in PACKAGES[1:]:
            if package in parts:
                inside = "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
                return f"{inside}:{frame.lineno} {frame.name}"
    return ""


# The run --------------------------------------------------------------------------------------------------------------


def prepare(work: Path, size: str) -> None:
    """Write the random checkpoint and its adapter once."""
    if (work / f"{size}-r8" / "adapter_config.json").exists():
        return
    if size == "pico":
        from tests import pico

        pico.adapter(pico.build("gemma4", work / size), work / "pico-r8", targets="all")
        return
    prepared_apart(size, work, (8,))


def in_process(case: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    command = ["bench.bridge", "--work", str(given.work), "--size", given.size, "--case", json.dumps(case)]
    started = time.perf_counter()
    row = row_of(command, timeout_s=given.timeout_s) or {}
    if "over_s" in row:
        return {"stage": "timeout", "seconds": given.timeout_s}
    if "error" in row:
        return {"stage": "crashed", "exception": {"type": "exit", "message": row["error"][-500:], "frame": ""}}
    return {**row, "seconds": seconds(started)}


def environment(size: str) -> dict[str, Any]:
    import torch

    device = "CPU (the GPU is imitated)" if size == "pico" else torch.cuda.get_device_name(0)
    return {"device": device, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for people."""
    lines = [f"{'case':24} {'ended':14} {'map kept':9} {'GPU base':>9} {'+adapter':>9} {'peak':>8}  logits / error"]
    for row in rows:
        sizes = [row.get(name) for name in ("base_bytes", "model_bytes", "gpu_peak_bytes")]
        shown_sizes = ["-" if not size else f"{size / 2**30:.2f}" for size in sizes]
        kept = {True: "yes", False: "NO", None: "-"}[row.get("placement_kept")]
        if "exception" in row:
            last = f"{row['exception']['type']}: {row['exception']['message'].splitlines()[0][:90]}"
        else:
            modes = row.get("modes", {})
            last = ", ".join(f"{kind} max diff {mode.get('max_abs', '(reference)')}" for kind, mode in modes.items())
        ended = "runs" if row["stage"] == "done" else row["stage"]
        lines.append(f"{row['name']:24} {ended:14} {kept:9} {shown_sizes[0]:>9} {shown_sizes[1]:>9} {shown_sizes[2]:>8}  {last}")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--size", choices=("e4b", "e2b", "pico"), default="e4b")
    parser.add_argument("--card-gib", type=float, default=T4_GIB)
    parser.add_argument("--timeout-s", type=float, default=90)
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        import warnings

        warnings.filterwarnings("ignore")
        print("ROW " + json.dumps(run_case(json.loads(given.case), given.work, given.size)))
        return
    prepare(given.work, given.size)
    rows = []
    for case in CASES:
        asked = {**case, "card_gib": given.card_gib}
        rows.append({**asked, **in_process(asked, given)})
        print(f"{rows[-1]['name']}: {rows[-1]['stage']} in {rows[-1].get('seconds', '?')} s", flush=True)
    found = environment(given.size)
    print(table(rows))
    print(json.dumps(found))
    runs = [run for run in saved(given.save).get("runs", []) if (run["environment"], run["size"]) != (found, given.size)]
    save(given.save, {"runs": [*runs, {"environment": found, "size": given.size, "rows": rows}]})


if __name__ == "__main__":
    main()
