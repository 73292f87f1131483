"""How does a case end on trimtab, through plan and load?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab import api
from trimtab.doctor.cases import stock_model
from trimtab.doctor.cases.cases import device_map, skip_modules
from trimtab.doctor.cases.engine_run import Emit, EngineRun, Enter, play
from trimtab.doctor.cases.inputs import NEW_TOKENS
from trimtab.errors import DoesNotFitError, TrimtabError
from trimtab.request import GenerateRequest

CONTEXT_TOKENS = 512
ADAPTER = "adapter"
CPU_TIERS = {"cpu": "stream", "disk": "disk"}


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one case and report its record's fields. request: that of an `EngineRun`. Without a GPU the entries of the user's map are
    requested by tier."""
    play(TrimtabRun, request, emit)


class TrimtabRun(EngineRun):
    """One case on trimtab."""

    def __init__(self, request: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(request, emit)
        self.on_gpu = request["device"] != "cpu"

    def run(self) -> None:
        """Report also why trimtab refused."""
        try:
            self.plan_and_load()
        except TrimtabError as exc:
            self.facts(how=f"refused: {type(exc).__name__}, {self.clean(str(exc)).splitlines()[0]}")
            raise

    def plan_and_load(self) -> None:
        import torch

        self.facts(device=torch.cuda.get_device_name(0) if self.on_gpu else "CPU", pressure=self.pressure)
        self.enter("base")
        self.parts = stock_model.parts_of(stock_model.empty_model(self.folder))
        requested = device_map(self.case.peft_map if self.case.call == "dispatch" else self.case.base_map, self.parts)
        self.facts(map_asked=requested)
        options = self.options(requested)
        adapter: str | None = ADAPTER if self.case.needs_adapter else None
        model_path = str(self.folder)
        if self.case.then:
            self.enter("merge")
            model_path, options = self.merge(model_path, options)
            adapter = None
        self.facts(configuration={"plan": {key: value for key, value in options.items() if key != "adapters"}})
        self.enter("base")
        plan = api.plan(model_path, **self.budget(model_path, options))
        self.enter("adapter" if adapter else "base")
        with api.load(plan) as model:
            self.look(plan, model, requested)
            self.ask_modes(model, adapter)

    def options(self, requested: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return the arguments of `trimtab.plan` for the case."""
        case = self.case
        options: dict[str, Any] = {
            "quant": case.quant, "context": CONTEXT_TOKENS, "images": 1, "audio_s": 2.0,
            "device": "cuda" if self.on_gpu else "cpu", "head": "full",
        }  # fmt: skip
        if case.needs_adapter:
            options["adapters"] = {ADAPTER: self.request["adapters"][case.adapter]}
        if case.quant != "none" and case.unquantized == "towers":
            options["keep_unquantized"] = tuple(skip_modules(self.parts))
        if isinstance(requested, str):
            return options
        if self.on_gpu:
            return {**options, "device_map": requested}
        off = {key: CPU_TIERS[place] for key, place in requested.items() if isinstance(place, str) and key}
        # {"": "cpu"} on a machine without a GPU changes nothing.
        return {**options, "place": {"*": "resident", **off}}

    def budget(self, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with the GPU budget that remains on the case's card."""
        share = self.pressure if self.case.gpu_share is None else self.case.gpu_share
        if share is None:
            return dict(options)
        if self.case.gpu_share is not None:
            return {**options, "gpu_memory": _smaller(model, options, share)}
        base = api.plan(model, **{key: value for key, value in options.items() if key != "adapters"})
        # The stock stack's process has its driver memory before the card is filled; a budget must include it.
        beside = base.gpu_needed_bytes - base.gpu_peak_bytes
        return {**options, "gpu_memory": int(base.gpu_peak_bytes / share) + beside}

    def merge(self, model: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the merged checkpoint's folder and the options to load it with."""
        from trimtab.merging import merge

        out = self.work / "merged"
        direct = self.case.lane == "direct-4bit-merge"
        # The result has the case's formats: 4 bits again, or bf16 if the case leaves the quantized base.
        merge(model, out, adapters=options["adapters"], dtype="bfloat16")
        kept = {key: value for key, value in options.items() if key not in ("adapters", "keep_unquantized")}
        if direct:
            return str(out), {**kept, "keep_unquantized": options["keep_unquantized"]}
        return str(out), {**kept, "quant": "none"}

    def look(self, plan: Any, model: Any, requested: Mapping[str, Any] | str) -> None:
        """Report the blocks per tier, and whether the requested modules are off the GPU: of a catch-all entry, those that can
        leave."""
        tiers = plan.tiers()
        fixed = {row.block_path for row in plan.placements if not row.reason.startswith("requested: ")}
        off = [] if isinstance(requested, str) else [key for key, place in requested.items() if isinstance(place, str)]
        under = {
            path: tier
            for path, tier in tiers.items()
            if any(path not in fixed if not key else path == key or path.startswith(f"{key}.") for key in off)
        }
        counts = {tier: list(tiers.values()).count(tier) for tier in dict.fromkeys(tiers.values())}
        self.facts(
            map_after=tiers,
            placement_kept=None if off == [""] and not self.on_gpu else "resident" not in under.values(),
            how=", ".join(f"{count} blocks {tier}" for tier, count in counts.items()) + self._merged_how(),
            memory={
                "gpu_allocated_bytes": model.memory()["gpu_bytes"], "gpu_peak_bytes": model.memory()["gpu_peak_bytes"],
                "gpu_planned_bytes": plan.gpu_peak_bytes,
            } if self.on_gpu else {},
        )  # fmt: skip

    def _merged_how(self) -> str:
        if not self.case.then:
            return ""
        return "; merged from the original checkpoint in bf16" + (
            ", quantized again" if self.case.lane == "direct-4bit-merge" else ""
        )

    def ask_modes(self, model: Any, adapter: str | None) -> None:
        """Ask the model in every mode."""
        from trimtab.engine.batch import generate
        from trimtab.engine.kv.sequence import Inputs

        def answer(mode: str, tensors: Mapping[str, Any], enter: Enter) -> tuple[Any, list[int], list[int]]:
            ids = tuple(tensors["input_ids"][0].tolist())
            inputs = Inputs(tensors, len(ids), ids, has_media=mode != "text")
            enter("first forward")
            with model.answering(adapter):
                logits = generate.logits(model, inputs)[-1]
                enter("generate")
                generated = list(generate.generate_text(model, inputs, GenerateRequest(max_new_tokens=NEW_TOKENS)).token_ids)
            return logits, generated, [1, len(ids) + len(generated)]

        self.ask(model.device, answer)


def _smaller(model: str, options: Mapping[str, Any], share: float) -> int:
    """Return this share of the whole model's GPU memory as the budget, or the smallest possible budget."""
    whole = api.plan(model, **options, place={"*": "resident"})
    try:
        api.plan(model, **options, gpu_memory=1)
    except DoesNotFitError as exc:
        return max(int(share * whole.gpu_peak_bytes), exc.needed_bytes)
    return int(share * whole.gpu_peak_bytes)
