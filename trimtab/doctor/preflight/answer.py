"""Which call works on this machine: the whole model on the GPU, towers off it, or a split plan?"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import Checkpoint
from trimtab.doctor.preflight.adapter import AdapterReading
from trimtab.doctor.preflight.shape import ModelShape, device_of, read_shape
from trimtab.doctor.preflight.unquantized import quantized_paths, stock_bytes, stock_kept
from trimtab.errors import DoesNotFitError, TrimtabError, gib
from trimtab.planning import Plan, make_plan
from trimtab.planning.values.blocks import Machine
from trimtab.planning.values.byte_sizes import Rates
from trimtab.report.render import filled
from trimtab.request import LoadRequest

ALL_ON_GPU, TOWERS_OFF, SPLIT, ON_CPU, DOES_NOT_FIT = (
    "all on the GPU", "towers off the GPU", "split by trimtab", "on the CPU", "does not fit",
)  # fmt: skip
KINDS = (ALL_ON_GPU, TOWERS_OFF, SPLIT, ON_CPU, DOES_NOT_FIT)
TOWERS = ("vision", "audio")
CONTEXTS = (2048, 1024, 512)
MOST_WAYS = 4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer for one machine.

    kind: one of KINDS, the simplest that works. reason: the numbers behind it. stock: Python with the stock objects, ""
    if no stock call works. python, command: the same with trimtab, "" if nothing fits. plan: trimtab's plan, None if
    nothing fits. needed_bytes: of the GPU (or host) for a refused request, else 0.
    """

    kind: str
    reason: str
    stock: str
    python: str
    command: str
    plan: Plan | None
    needed_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("kind", "reason", "stock", "python", "command")}
        plan = None if self.plan is None else self.plan.to_json()
        return values | {"needed_bytes": self.needed_bytes, "plan": plan}


@dataclass(frozen=True, kw_only=True)
class Asking:
    """All that the answer depends on.

    given: the user's memory flags -> text. towers_dense: the installed stock stack computes wrongly, or fails, with
    quantized towers (H1, D2 of the catalogue), so that its call has to keep them out. python: the interpreter of the
    stack, None for this one.
    """

    checkpoint: Checkpoint
    request: LoadRequest
    shape: ModelShape
    adapter: AdapterReading | None
    machine: Machine
    rates: Rates
    given: Mapping[str, str]
    towers_dense: bool = False
    python: str | os.PathLike[str] | None = None


def answer_for(asking: Asking) -> Answer:
    """Return the call that works for the request on the machine."""
    machine = asking.machine
    if machine.on_cpu:
        return _by_trimtab(asking, ON_CPU, "torch can use no GPU here; trimtab computes on the CPU")
    whole = _try(asking, replace(asking.request, place={"*": "resident"}))
    if isinstance(whole, Plan):
        reason = f"{gib(whole.gpu_needed_bytes)} needed of {gib(whole.gpu_budget_bytes)} with every weight resident"
        dense = _dense_towers_bytes(asking) if asking.towers_dense else 0
        fits = whole.gpu_needed_bytes + dense <= whole.gpu_budget_bytes
        if dense:
            reason += f"; the stock stack of these versions needs {gib(dense)} more, for towers that it must not quantize"
        return _with_calls(asking, ALL_ON_GPU, reason, whole, stock_call(asking, {"": 0}) if fits else "")
    missing = f"all on the GPU needs {gib(whole.needed_bytes)} of {gib(whole.budget_bytes)}"
    towers = _towers_off(asking, whole)
    if towers is not None:
        device_map, reason = towers
        answer = _by_trimtab(asking, TOWERS_OFF, f"{missing}; {reason}")
        return replace(answer, stock=stock_call(asking, device_map), kind=TOWERS_OFF, needed_bytes=whole.needed_bytes)
    return replace(_by_trimtab(asking, SPLIT, missing), needed_bytes=whole.needed_bytes)


def _by_trimtab(asking: Asking, kind: str, reason: str) -> Answer:
    planned = _try(asking, asking.request)
    if isinstance(planned, Plan):
        tiers = sorted(set(planned.tiers().values()))
        words = f"{reason}; trimtab's plan needs {gib(planned.gpu_needed_bytes)} ({', '.join(tiers)})"
        return _with_calls(asking, kind, words, planned, "")
    words = f"{reason}; the smallest placement needs {gib(planned.needed_bytes)} on {planned.device} of {gib(planned.budget_bytes)}"
    return Answer(
        kind=DOES_NOT_FIT, reason=f"{words}. {_what_would_fit(asking)}".rstrip(), stock="", python="",
        command="", plan=None, needed_bytes=planned.needed_bytes,
    )  # fmt: skip


def _what_would_fit(asking: Asking) -> str:
    """Return fitting alternatives, with figures: other settings, and the smaller model of the family."""
    smaller = _smaller_model(asking)
    fits = _fitting_ways(asking)
    if fits:
        return f"What fits: {'; '.join([*fits[:MOST_WAYS], *smaller])}. "
    nothing = "No smaller context, head or prompt fits"
    return f"{nothing}; what fits: {smaller[0]}. " if smaller else f"{nothing}. "


def _smaller_model(asking: Asking) -> list[str]:
    """Return the smaller model of the family with its memory, nothing if there is none or if it does not fit either. The
    adapter counts with the bytes of the given one, because an adapter of the smaller model is not larger."""
    if not has_smaller(asking.checkpoint.config):
        return []
    try:
        shape = smaller_shape(quant=asking.shape.quant, dtype=asking.request.dtype, python=asking.python)
        plan = _try(replace(asking, shape=shape), asking.request)
    except TrimtabError:  # this transformers cannot build it
        return []
    if isinstance(plan, Plan):
        return [f"{SMALLER_NAME} of the same family, as asked ({gib(plan.gpu_needed_bytes)} of {gib(plan.gpu_budget_bytes)})"]
    ways = _fitting_ways(replace(asking, shape=shape))
    return [f"{SMALLER_NAME} of the same family with {ways[0]}"] if ways else []


def _fitting_ways(asking: Asking) -> list[str]:
    """Return the settings that fit, each with its memory, the smallest change first."""
    request = asking.request
    fewer = {f"--context {tokens}": {"context_tokens": tokens} for tokens in CONTEXTS if tokens < request.context_tokens}
    silent: dict[str, Any] = {"images": 0, "audio_s": 0.0}
    ways: dict[str, dict[str, Any]] = {"--head int8": {"head": "int8"}, **fewer, "--images 0 --audio-s 0": silent}
    least = {name: value for changed in ways.values() for name, value in changed.items()}
    ways[" ".join(["--head int8", *list(fewer)[-1:], "--images 0 --audio-s 0"])] = least
    fits = []
    for words, changed in ways.items():
        try:
            plan = _try(asking, replace(request, **changed))
        except TrimtabError:  # the head cannot be in 8 bits
            continue
        if isinstance(plan, Plan):
            fits.append(f"{words} ({gib(plan.gpu_needed_bytes)})")
    return fits


def _try(asking: Asking, request: LoadRequest) -> Plan | DoesNotFitError:
    """Return the plan of a request, or why there is none."""
    spec = None if asking.adapter is None else asking.adapter.spec
    adapters = {} if spec is None else {next(iter(request.adapters), "adapter"): spec.nbytes("float32")}
    try:
        return make_plan(
            request, asking.shape.anatomy, adapters=adapters, machine=asking.machine, rates=asking.rates,
            checkpoint_stamps=asking.checkpoint.stamps, is_advised=False,
        )  # fmt: skip
    except DoesNotFitError as exc:
        return exc


def _dense_towers_bytes(asking: Asking) -> int:
    """Return the additional bytes of the towers in full precision, compared with their quantized size."""
    shape = asking.shape
    packed = stock_bytes(shape, quantized_paths(shape, stock_kept(shape, takes_map=False)))
    dense = stock_bytes(shape, frozenset())
    towers = {row.module_path for row in shape.anatomy.rows if row.part in TOWERS and row.quantized}
    return sum(dense[f"{path}.weight"] - packed[f"{path}.weight"] for path in towers)


# Towers off the GPU, by the stock stack -------------------------------------------------------------------------------


def towers_map(shape: ModelShape) -> dict[str, int | str] | None:
    """Return a map that names every module, towers on the CPU; None for a model without towers.

    No "" key (C1, C2, C4 of the catalogue), no key that is the beginning of another name (C6).
    """
    parts: dict[str, set[str]] = {}
    for row in shape.anatomy.rows:
        pieces = row.module_path.split(".")
        for end in range(len(pieces) + 1):
            parts.setdefault(".".join(pieces[:end]), set()).add(row.part)
    if not parts.get("", set()) & set(TOWERS):
        return None
    children: dict[str, list[str]] = {}
    for module in shape.modules:
        if module.module_path:
            parent = module.module_path.rpartition(".")[0]
            children.setdefault(parent, []).append(module.module_path)
    result: dict[str, int | str] = {}

    def name(path: str) -> None:
        inside = parts.get(path, set())
        if path and inside <= set(TOWERS) and inside:
            result[path] = "cpu"
        elif path and not inside & set(TOWERS):
            result[path] = 0
        else:
            for child in children.get(path, ()):
                name(child)

    name("")
    return result


def _towers_off(asking: Asking, whole: DoesNotFitError) -> tuple[dict[str, int | str], str] | None:
    """Return (map, why) if the stock stack fits with towers on the CPU: they are unquantized there, and copied layer by
    layer."""
    device_map = towers_map(asking.shape)
    if device_map is None or whole.device == "host":
        return None
    shape = asking.shape
    resident = stock_bytes(shape, quantized_paths(shape, stock_kept(shape, takes_map=False)))
    dense = stock_bytes(shape, frozenset())
    off = [tensor for tensor in resident if device_of(tensor, device_map) == "cpu"]
    blocks = {row.module_path: row.block for row in shape.anatomy.rows}
    by_block: dict[str, int] = {}
    for tensor in off:
        block = blocks.get(tensor.rpartition(".")[0], "")
        by_block[block] = by_block.get(block, 0) + dense[tensor]
    needed = whole.needed_bytes - sum(resident[tensor] for tensor in off) + max(by_block.values(), default=0)
    host = sum(dense[tensor] for tensor in off) + asking.machine.process_bytes
    if needed > whole.budget_bytes or host > asking.machine.host_available_bytes:
        return None
    return device_map, (
        f"with the towers on the CPU, unquantized there ({gib(sum(dense[tensor] for tensor in off))}), about {gib(needed)}"
    )


# The calls ------------------------------------------------------------------------------------------------------------


def stock_call(asking: Asking, device_map: Mapping[str, int | str]) -> str:
    """Return Python code that loads base and adapter with stock objects, for this map."""
    anatomy, quant, adapter = asking.shape.anatomy, asking.shape.quant, asking.adapter
    is_split = "cpu" in device_map.values()  # PEFT's second plan would undo such a map
    is_made = quant != "none" and anatomy.prequantized is None
    if adapter is not None and adapter.spec is None:
        adapter = None
    # The targets of a file whose own ones PEFT refuses, or that name too few modules.
    targets = repr(adapter.plain_targets).replace("\\\\", "\\") if adapter and (adapter.wrappers or adapter.dropped) else ""
    return filled(
        Path(__file__).parent, "stock_call.py.j2", model=repr(asking.request.model), model_class=anatomy.model_class,
        dtype=anatomy.dtype, reader="AutoProcessor" if set(anatomy.parts) & set(TOWERS) else "AutoTokenizer",
        device_map=repr(dict(device_map)).replace("'", '"'), is_split=is_split, targets=targets,
        quantization=_quantization(asking, is_split) if is_made else "", adapter=repr(adapter.path) if adapter else "",
    )  # fmt: skip


def _quantization(asking: Asking, split: bool) -> str:
    anatomy, quant = asking.shape.anatomy, asking.shape.quant
    options = ["load_in_8bit=True"]
    if quant != "int8":
        options = [
            "load_in_4bit=True", f'bnb_4bit_quant_type="{quant[:3]}"',
            f"bnb_4bit_use_double_quant={quant == 'nf4-dq'}", f"bnb_4bit_compute_dtype=torch.{anatomy.dtype}",
        ]  # fmt: skip
    if split:
        options.append("llm_int8_enable_fp32_cpu_offload=True")
    elif asking.towers_dense:
        options.append(f"llm_int8_skip_modules={_skip_list(asking.shape)}")
    return ", ".join(options)


def _skip_list(shape: ModelShape) -> str:
    """Return the towers with stock's default skip list, because the caller's list replaces the default (H4)."""
    own = list(stock_kept(shape, takes_map=False))
    towers = [key for key, device in (towers_map(shape) or {}).items() if device == "cpu"]
    return "[" + ", ".join(f'"{path}"' for path in (*own, *towers)) + "]"


def adapter_name(path: str | os.PathLike[str]) -> str:
    """Return an adapter name from its folder's, with only valid characters."""
    text = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in Path(path).name)
    return text.lstrip("._-")[:64] or "adapter"


def _with_calls(asking: Asking, kind: str, reason: str, plan: Plan, stock: str) -> Answer:
    request, budgets = asking.request, asking.given
    names = list(request.adapters.items())
    options = [f"quant={request.quant!r}", *(f"{flag.replace('-', '_')}={text!r}" for flag, text in budgets.items())]
    if names:
        options.insert(0, "adapters={" + ", ".join(f"{name!r}: {path!r}" for name, path in names) + "}")
    use = f", adapter={names[0][0]!r}" if names else ""
    python = (
        f"import trimtab\n\nplan = trimtab.plan({request.model!r}, {', '.join(options)})\n"
        f'with trimtab.load(plan) as model:\n    print(model.answer("What is trim?"{use}).text)\n'
    )
    words = ["trimtab", "run", request.model]
    for name, path in names:
        words += ["--adapter", f"{name}={path}"]
    words += ["--use", names[0][0]] if names else []
    words += ["--quant", request.quant]
    for flag, text in budgets.items():
        words += [f"--{flag}", text]
    words.append("What is trim?")
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return Answer(kind=kind, reason=reason, stock=stock, python=python, command=command, plan=plan)


SMALLER_NAME = "E2B"
# E4B is recognized by the text model's type, width and layers; of E2B the config.json is here.
_E4B = ("gemma4_text", 2560, 42)


def has_smaller(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this config.json has a smaller one in its family."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return False
    return (text.get("model_type"), text.get("hidden_size"), text.get("num_hidden_layers")) == _E4B


def smaller_shape(*, quant: str, dtype: str, python: str | os.PathLike[str] | None) -> ModelShape:
    """Return the shape of the smaller model. Errors: as those of `read_shape`."""
    return read_shape(Path(__file__).parent / "e2b", {}, quant=quant, dtype=dtype, python=python)
