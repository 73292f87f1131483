"""Which launch configurations of a loaded model are the fastest on this card, each matmul alone?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from trimtab.engine.batch.batch import Batch
from trimtab.engine.cuda import shipped_configs
from trimtab.engine.families import families
from trimtab.engine.kernels import autotune, gemv4
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.engine.model import LoadedModel
from trimtab.errors import DeviceError, RequestError
from trimtab.planning.values.execution import PRODUCT_ROWS
from trimtab.report.document import Document, Table
from trimtab.report.render import Report


@dataclass(frozen=True)
class TuneReport(Report):
    """The result of a tuning. products: timed now; known: of all products, how each one's configuration is known, with its cut."""

    card: str
    capability: tuple[int, int]
    products: int
    known: tuple[dict[str, object], ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready values."""
        return asdict(self)

    def document(self) -> Document:
        """Return what it says."""
        rows = [[str(one[name]) for name in ("product", "rows", "cut", "status")] for one in self.known]
        title = f"{self.products} matmuls were timed on {self.card}; the next load uses the fastest."
        return Document(title, [Table(("matmul", "rows", "configuration", "known"), rows)] if rows else [])


def unsupported_reason(model: LoadedModel) -> str | None:
    """Return why a model has nothing to tune, or None."""
    if model.device.type != "cuda":
        return f"the model runs on {model.device}; launch configurations are of GPU kernels"
    return families.why_not(model.hf_model)


def tune_model(
    model: LoadedModel, *, rows: int = max(PRODUCT_ROWS), progress: Callable[[int, int], None] | None = None
) -> tuple[TuneReport, dict[str, object]]:  # fmt: skip
    """Tune every product of a loaded model for steps of up to `rows` rows; return the report and the document of all that was
    tuned for this card, as it may be shipped.

    Errors: RequestError if nothing of the model can be tuned; DeviceError if its kernels do not work on this card. The next process
    that loads such layers uses the results; a running one keeps its configurations, so that its answers keep their bits.
    """
    why = unsupported_reason(model)
    if why is not None:
        raise RequestError(f"nothing to tune: {why}", field="model", value=model.plan.request.model)
    if not 1 <= rows <= max(PRODUCT_ROWS):
        raise RequestError(f"must be between 1 and {max(PRODUCT_ROWS)}", field="rows", value=rows)
    batch = Batch(model, rows=rows)
    kernels: DeviceKernels = batch.steps.kernels
    if kernels.matvec is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in kernels.left_out.items()) or "they were not chosen"
        raise DeviceError(f"the 4-bit kernels are not used on this card: {reasons}", device=str(model.device))
    groups = families.describe(model.hf_model).groups()
    counts = [count for count in PRODUCT_ROWS if count <= rows]
    timed = kernels.tune(groups, model.dtype, counts, progress=progress)
    target = gemv4.target_of(kernels.matvec)
    known = []
    for product in kernels.products(groups, model.dtype, counts):
        cut = gemv4.choose(product.groups[0], product.n, kernels.matvec, pair=product.gate is not None)
        is_tuned = product.key in kernels.matvec.products.measured
        status = shipped_configs.MEASURED if is_tuned else kernels.configs.get(product.key, shipped_configs.ESTIMATED)
        sizes = " + ".join(str(packed.shape[0]) for packed in product.groups[0])
        known.append({"product": f"{sizes} x {product.key[2]}", "rows": product.n, "cut": str(cut), "status": status})
    report = TuneReport(target.name, target.capability, timed, tuple(known))
    return report, shipped_configs.document(target, shipped_configs.kept(target), autotune.releases())
