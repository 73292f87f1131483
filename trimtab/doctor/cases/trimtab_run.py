"""How does a case end on trimtab, through plan and load?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.cases.cases import Case, device_map, skip_modules
from trimtab.process.redact import Cleaner

Emit = Callable[[dict[str, Any]], None]
CONTEXT_TOKENS = 512
ADAPTER = "adapter"
CPU_TIERS = {"cpu": "stream", "disk": "disk"}


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one case on trimtab and report its record's fields. request: as for `stock_run.main`. Without a GPU the entries of the
    user's map are requested by tier."""
    emit({"stage": "import"})
    from trimtab.doctor.cases.record import exception_json, listening, versions

    emit({"facts": {"versions": versions()}})
    clean = Cleaner(request["names"])
    run = _Run(Case.from_json(request["case"]), request, emit, clean)
    with listening() as events:
        try:
            run.run()
        except Exception as exc:
            failure = exception_json(exc, clean)
            how = f"refused: {type(exc).__name__}, {failure['message'].splitlines()[0]}" if failure["ours"] else ""
            emit({"facts": {"exception": failure, **({"how": how} if how else {})}})
        finally:
            emit({"facts": events.to_json(clean)})


class _Run:
    def __init__(self, case: Case, request: Mapping[str, Any], emit: Emit, clean: Any) -> None:
        self.case, self.request, self.emit, self.clean = case, request, emit, clean
        self.on_gpu = request["device"] != "cpu"
        self.pressure = case.pressure if request["pressure"] is None else request["pressure"]

    def facts(self, **found: Any) -> None:
        self.emit({"facts": found})

    def enter(self, stage: str) -> None:
        self.emit({"stage": stage})

    def run(self) -> None:
        import torch

        from trimtab import api
        from trimtab.doctor.cases import stock_model as case_model

        self.facts(device=torch.cuda.get_device_name(0) if self.on_gpu else "CPU", pressure=self.pressure)
        self.enter("base")
        folder = Path(self.request["model"])
        self.parts = case_model.parts_of(case_model.empty_model(folder))
        requested = device_map(self.case.peft_map if self.case.call == "dispatch" else self.case.base_map, self.parts)
        self.facts(map_asked=requested)
        options = self.options(requested)
        adapter: str | None = ADAPTER if self.case.needs_adapter else None
        model_path = str(folder)
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
            self.ask(model, adapter)

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
        from trimtab import api

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

        out = Path(self.request["work"]) / "merged"
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

    def ask(self, model: Any, adapter: str | None) -> None:
        """Run every mode, as the stock run does."""
        from trimtab.doctor.cases import answers as case_answers
        from trimtab.doctor.cases import inputs as case_inputs
        from trimtab.doctor.cases.record import exception_json
        from trimtab.engine.batch import generate
        from trimtab.engine.kv.sequence import Inputs

        given = case_inputs.read_inputs(Path(self.request["inputs"]), model.device)
        reference = self.request["reference"]
        references = case_answers.References(Path(reference) if reference else None)
        to = case_answers.ADAPTER if self.case.needs_adapter else case_answers.BASE
        modes: dict[str, Any] = {}
        failed = ""
        for mode, tensors in given.items():
            ids = tuple(tensors["input_ids"][0].tolist())
            inputs = Inputs(tensors, len(ids), ids, has_media=mode != "text")
            stage = "first forward"
            try:
                self.enter(failed or stage)
                with model.answering(adapter):
                    logits = generate.logits(model, inputs)[-1]
                    stage = "generate"
                    self.enter(failed or stage)
                    answer = generate.generate_text(model, inputs, _greedy())
                modes[mode] = {
                    "ok": True, "output_shape": [1, len(ids) + len(answer.token_ids)], "exception": None,
                    "text": case_inputs.read_text(Path(self.request["model"]), list(answer.token_ids)),
                    **references.compare(mode, logits, list(answer.token_ids), to=to),
                }  # fmt: skip
            except Exception as exc:
                failure = exception_json(exc, self.clean)
                modes[mode] = case_answers.no_answer(failure, stage)
                if not failed:
                    failed = stage
                    self.facts(exception=failure)
            self.facts(modes=modes)
        self.enter(failed or "done")


def _smaller(model: str, options: Mapping[str, Any], share: float) -> int:
    """Return this share of the whole model's GPU memory as the budget, or the smallest possible budget."""
    from trimtab import api
    from trimtab.errors import DoesNotFitError

    whole = api.plan(model, **options, place={"*": "resident"})
    try:
        api.plan(model, **options, gpu_memory=1)
    except DoesNotFitError as exc:
        return max(int(share * whole.gpu_peak_bytes), exc.needed_bytes)
    return int(share * whole.gpu_peak_bytes)


def _greedy() -> Any:
    from trimtab.doctor.cases.inputs import NEW_TOKENS
    from trimtab.request import GenerateRequest

    return GenerateRequest(max_new_tokens=NEW_TOKENS)
