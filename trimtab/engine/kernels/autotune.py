"""Are the 4-bit products right on this card, and which launch configuration is the fastest of each?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.engine.cuda import launch_config, nvrtc, shipped_configs
from trimtab.engine.cuda.launch_config import BLOCK, LaunchConfig
from trimtab.engine.cuda.nvrtc import Job
from trimtab.engine.formats.packed import Draw, Packed, digest_of
from trimtab.engine.formats.weights import quantize, random_parts, rounded
from trimtab.engine.kernels import attention_and_norms, dequantize, embed_and_logits, gemm4, gemv4, layouts
from trimtab.engine.kernels.selfcheck import exact_changes, graph_us, pair_us, random_values, relative_error
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.errors import DeviceError
from trimtab.formats.record import stored_format
from trimtab.request import DEFAULT_QUANT

__all__ = [
    "LARGEST_ERROR", "RandomWeights", "check", "compile_ahead", "compile_cuts", "compile_tried", "graph_us", "jobs", "keep_tuned",
    "pair_us", "relative_error", "tune", "why_no_room", "why_not_cut",
]  # fmt: skip

_PIECE = 2**20
# Of products from float64 (norm of the difference over norm of y), which is the rounding of y: 1.7e-3 in bfloat16, 2.5e-4 in
# float16. bitsandbytes' own kernel has 3.6e-3 in bfloat16.
LARGEST_ERROR = 3e-3


def _exact(x: Tensor, weights: Sequence[Packed]) -> Tensor:
    """Return x W^T in float64, decoding a million weights at a time."""
    step, pieces = max(1, _PIECE // x.shape[1]), []
    for packed in weights:
        own = rounded(packed, x, is_input=True).double()
        for start in range(0, packed.shape[0], step):
            y = own @ gemv4.decoded(packed, torch.float64, rows=slice(start, start + step)).T
            pieces.append(y if packed.static_scales is None else rounded(packed, y.to(x.dtype), is_input=False).double())
    return torch.cat(pieces, dim=1)


def check(
    weights: Sequence[Packed], module: nvrtc.Module, *, dtype: torch.dtype = torch.bfloat16, rows: Sequence[int] = (1, 3, 8),
    cut: LaunchConfig | None = None, rank: int = 8,
) -> str | None:  # fmt: skip
    """Return the error of the kernels over these weights on this device, or None; outputs are poisoned first.

    Random inputs with and without adapters, against float64. Needs about 25 MiB in addition to the weights.
    """
    device = module.device
    random = random_values(device, 1)
    counts, columns, most = [packed.shape[0] for packed in weights], weights[0].shape[1], max(rows)
    slots: list[list[tuple[Tensor, Tensor, float] | None]] = [
        [None, (random(rank, columns) / columns**0.5, random(count, rank), 0.5)] for count in counts
    ]
    inputs = random(most, columns).to(dtype)
    base = _exact(inputs, weights)
    own = [1 - i % 2 for i in range(most)]  # every other row has no adapter
    both = base + torch.cat([exact_changes(inputs, one, own) for one in slots], dim=1)
    for n in rows:
        if cut is not None and cut.n != n:
            continue
        # Terms of a row's only output may cancel, so the size of all rows counts; one rounding is up to 2^-8, not its mean.
        least, least_changed = ((n / most) ** 0.5 * float(one.norm()) for one in (base, both))
        limit = LARGEST_ERROR * (2 if n * sum(counts) < 32 else 1)
        x, out = inputs[:n], torch.full((n, sum(counts)), math.nan, dtype=dtype, device=device)
        gemv4.matvec4(x, weights, out, module=module, cut=cut)
        if (error := relative_error(out, base[:n], least)) > limit:
            return f"{n} rows over {counts} x {columns}: relative error {error:.1e}"
        lora = gemv4.lora_args(slots, torch.tensor(own[:n], dtype=torch.int32, device=device), rank)
        out.fill_(math.nan)
        lora.low.fill_(math.nan)
        gemv4.matvec4(x, weights, out, lora=lora, module=module, cut=cut)
        # Rounded three times instead of once.
        if (error := relative_error(out, both[:n], least_changed)) > 1.5 * limit:
            return f"{n} rows with an adapter over {counts} x {columns}: relative error {error:.1e}"
    return None


class RandomWeights:
    """Makes packed weights of random bytes on a device; the code tables are bitsandbytes' own. scale_dtype: of other formats."""

    def __init__(self, device: torch.device, *, quant: str = DEFAULT_QUANT, scale_dtype: torch.dtype = torch.bfloat16) -> None:
        self.quant = quant
        self.draw = Draw(torch.Generator(device=device).manual_seed(0), scale_dtype)
        self.codes: Mapping[str, Tensor] = {}
        self.blocks: tuple[int, ...] = ()
        if stored_format(quant).tables:
            sample = quantize(torch.ones(BLOCK, BLOCK, device=device, dtype=torch.bfloat16), quant)
            self.codes, self.blocks = sample.codes, sample.blocks

    def make(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Packed:
        """Return a weight [rows, columns] whose values are about 0.03."""
        parts = random_parts(self.quant, rows, columns, self.draw)
        made = Packed(self.quant, (rows, columns), dtype, parts, self.codes, self.blocks)
        made = made if made.index is None else replace(made, order=digest_of(made.index))
        return made if made.static_scales is None else replace(made, input_scale=float(made.static_scales[0]))

    def groups(self, rows: Sequence[int], columns: int, nbytes: int) -> list[list[Packed]]:
        """Return as many groups of layers over one input as take up `nbytes`, each of different bytes; at least two."""
        count = max(2, min(96, round(nbytes / (sum(rows) * columns * 0.516))))
        return [[self.make(one, columns) for one in rows] for _ in range(count)]


class _Product:
    """One product of random inputs over real or random weights, without and with adapters, to compare and time its cuts."""

    def __init__(self, weights: Sequence[Packed], n: int, module: nvrtc.Module, dtype: torch.dtype, gate: str | None) -> None:
        self.weights, self.module, self.pair = weights, module, gate is not None
        rows, columns, device = [packed.shape[0] for packed in weights], weights[0].shape[1], module.device
        random = random_values(device, 2)
        self.x = random(n, columns).to(dtype)
        self.out = torch.empty(n, rows[0] if self.pair else sum(rows), dtype=dtype, device=device)
        slots = [[(random(8, columns) / columns**0.5, random(count, 8), 0.5)] for count in rows]
        numbers = torch.tensor([-(i % 2) for i in range(n)], dtype=torch.int32, device=device)
        self.lora = gemv4.lora_args(slots, numbers, 8)
        self.gate = None if gate is None else gemv4.Gate(gate)

    def answers(self, cut: LaunchConfig | None) -> list[Tensor]:
        """Return the outputs without and with adapters; cut None: that of `gemv4.choose`."""
        results = []
        for lora in (None, self.lora):
            gemv4.matvec4(self.x, self.weights, self.out.fill_(math.nan), lora=lora, gate=self.gate, module=self.module, cut=cut)
            results.append(self.out.clone())
        return results

    def is_right(self, cut: LaunchConfig, wanted: Sequence[Tensor]) -> bool:
        """Whether a cut runs here and computes the expected result."""
        try:
            results = self.answers(cut)
        except DeviceError as exc:  # it does not compile, or not run, on this card
            if is_out_of_memory(exc):
                raise
            return False
        return all(relative_error(a, b) <= LARGEST_ERROR for a, b in zip(results, wanted, strict=True))


def why_no_room(
    weights: Sequence[Packed], module: nvrtc.Module, cut: LaunchConfig, *, dtype: torch.dtype, pair: bool, is_timed: bool = False
) -> str | None:  # fmt: skip
    """Return why a launch configuration does not compile, or has no room in the card's shared memory and registers, or None."""
    if not cut.held:
        return None
    try:
        limits = module.variant(gemv4.options(weights[0], dtype, cut, members=len(weights), pair=pair)).limits(cut.kernel)
    except DeviceError as exc:
        if is_out_of_memory(exc):
            raise
        return str(exc)
    return shipped_configs.why_not(cut, limits, module.shared_bytes, is_timed=is_timed)


def why_not_cut(
    weights: Sequence[Packed], n: int, module: nvrtc.Module, cut: LaunchConfig, *, dtype: torch.dtype, gate: str | None,
    small: nvrtc.Module | None = None, is_timed: bool = False,
) -> str | None:  # fmt: skip
    """Return why a launch configuration that was not measured here is not used, or None.

    It must fit the card's shared memory and registers, and compute the result of the plain kernel. small: the module with
    `add_norm`, for a configuration with the norm in front. is_timed: it was the fastest on another such card.
    """
    pair = gate is not None
    if (why := why_no_room(weights, module, cut, dtype=dtype, pair=pair, is_timed=is_timed)) is not None:
        return why
    product = _Product(weights, n, module, dtype, gate)
    plain = next((one for one in gemv4.ways(weights, n, module, pair=pair) if not one.held), None)
    if plain is None:
        return "there is no plain configuration to compare it with"
    if not product.is_right(cut, product.answers(plain)):
        return "its result differs"
    if cut.normed:
        if small is None or cut.normed_bytes(weights[0].shape[1]) > module.shared_bytes:
            return "there is no room for the norm before it"
        *_, is_right = _norm_in_front([weights], product.x, product.out, cut, product.gate, module, small)
        if not is_right():
            return "with the norm in front its result differs"
    return None


def tune(
    groups: Sequence[Sequence[Packed]], n: int, module: nvrtc.Module, *, dtype: torch.dtype = torch.bfloat16,
    gate: str | None = None, limit: int = 8, repeat: int = 3, small: nvrtc.Module | None = None,
) -> dict[LaunchConfig, float]:  # fmt: skip
    """Time the cuts that may be fastest over groups of the same shapes, keep the fastest one; return µs a product.

    groups: as many layers' weights as it takes to be larger than the card's L2 cache, or the second run reads no memory. Each cut
    runs over all groups in a CUDA graph, launches overlapping where the card can do that, as in a step. gate: the activation of a
    pair. A cut that cannot run here or differs from `choose`'s result is dropped, however fast it is. small: the module with
    `add_norm`, to time the norm in front by itself and as a part of the product.
    """
    weights, device = groups[0], module.device
    product = _Product(weights, n, module, dtype, gate)
    columns, overlap = weights[0].shape[1], module.capability >= (9, 0)
    wanted, times = product.answers(None), dict[LaunchConfig, float]()
    for cut in launch_config.unlike(gemv4.ways(weights, n, module, pair=product.pair), limit):
        if not product.is_right(cut, wanted):
            continue

        def run(cut: LaunchConfig = cut) -> None:
            for group in groups:
                gemv4.matvec4(product.x, group, product.out, gate=product.gate, module=module, cut=cut, dependent=overlap)

        times[cut] = graph_us(run, device, repeat=repeat) / len(groups)
    if times:
        best = min(times, key=lambda cut: times[cut])
        if small is not None and best.may_be_normed and not weights[0].order and best.normed_bytes(columns) <= module.shared_bytes:
            pays = _norm_pays(groups, product.x, product.out, best, product.gate, module, small, overlap=overlap, repeat=repeat)
            if pays is not None:
                best = replace(best, normed=pays)
        key = gemv4.cut_key(weights, n, pair=product.pair)
        module.products.chosen[key] = best
        module.products.measured.add(key)
    return times


def _norm_in_front(
    groups: Sequence[Sequence[Packed]], y: Tensor, out: Tensor, cut: LaunchConfig, gate: gemv4.Gate | None, module: nvrtc.Module,
    small: nvrtc.Module, *, overlap: bool = False,
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], bool]]:  # fmt: skip
    """Return (`add_norm` and the product, a product with its norm, whether the second computes the same as the first)."""
    weight = torch.rand(y.shape[1], device=y.device).to(y.dtype) + 0.5
    form, has_post = module.products.norm
    norm = gemv4.Norm(torch.randn_like(y), weight if has_post else None, weight, 1e-6, None, torch.empty_like(y), form)
    x = torch.empty_like(y)

    def both() -> None:
        for group in groups:
            norm.apply(y, x, small, dependent=overlap)
            gemv4.matvec4(x, group, out, gate=gate, module=module, cut=cut, dependent=overlap)

    def one() -> None:
        for group in groups:
            gemv4.matvec4(y, group, out, gate=gate, norm=norm, module=module, cut=cut, dependent=overlap)

    def is_right() -> bool:
        both()
        wanted, h = out.clone(), norm.out_h.clone()
        out.fill_(math.nan), norm.out_h.fill_(math.nan)
        one()
        return relative_error(out, wanted) <= LARGEST_ERROR and relative_error(norm.out_h, h) <= LARGEST_ERROR

    return both, one, is_right


def _norm_pays(
    groups: Sequence[Sequence[Packed]], y: Tensor, out: Tensor, cut: LaunchConfig, gate: gemv4.Gate | None, module: nvrtc.Module,
    small: nvrtc.Module, *, overlap: bool, repeat: int,
) -> bool | None:  # fmt: skip
    """Whether a product with its norm takes less time than `add_norm` and the product; None if its result differs."""
    both, one, is_right = _norm_in_front(groups, y, out, cut, gate, module, small, overlap=overlap)
    if not is_right():
        return None
    return graph_us(one, module.device, repeat=repeat) < graph_us(both, module.device, repeat=repeat)


def compile_tried(
    products: Iterable[tuple[Sequence[Packed], int, bool]], module: nvrtc.Module, dtype: torch.dtype, *, limit: int = 8
) -> None:
    """Compile, several at once, the cuts that `tune` will try for these products (weights, rows, whether two are multiplied)."""
    tried = ((one, launch_config.unlike(gemv4.ways(*one[:2], module, pair=one[2]), limit)) for one in products)
    compile_cuts([  # the first is the most likely to be chosen
        (weights, pair, replace(cut, normed=number == 0 and cut.may_be_normed))
        for (weights, _, pair), ways in tried for number, cut in enumerate(ways)
    ], module, dtype)  # fmt: skip


def jobs(
    weights: Sequence[tuple[Sequence[Packed], bool]], attention: Sequence[attention_and_norms.AttentionShape], module: nvrtc.Module,
    dtype: torch.dtype, *, checked: Sequence[int], counts: Sequence[int], has_many: bool = False,
) -> list[Job]:  # fmt: skip
    """Return the sources and variants to compile for products of these weights (a group, whether two are multiplied) and these
    kinds of attention (heads, kv heads, head size).

    module: of the products; it knows the limits of the card. checked: row counts of the checks. counts: row counts of the
    steps. has_many: steps of more rows too.
    """
    wanted = [Job(attention_and_norms.source(), (), "fused.cu"), Job(embed_and_logits.source(), (), "ends.cu")]
    wanted.append(Job(dequantize.source(), (), "prompt.cu"))
    own = [packed for group, _ in weights for packed in group if stored_format(packed.kind).number]
    others = {layouts.options(packed) for packed in own if layouts.layout(packed) is not None}
    wanted += [Job(dequantize.source(), options, "prompt.cu") for options in others]
    if has_many:
        wanted += [Job(gemm4.source(), options, "rows.cu") for options in ((), *others)]
    for kind in attention:
        if attention_and_norms.why_not(*kind[:3], dtype) is None:
            source, options_of = attention_and_norms.source("attend.cu"), attention_and_norms.attention_options
            wanted += [Job(source, options_of(kind, dtype, turn=turn), "attend.cu") for turn in (True, False)]
    # Those without a configuration take longest: none of them is the last to begin.
    variants: tuple[dict[tuple[str, ...], None], ...] = {}, {}
    for group, pair in weights:
        if any(gemv4.why_not(packed, dtype, module.device) for packed in group):
            continue
        for one in (group[part] for part in layouts.runs(group)):
            for n in counts:
                config = gemv4.config_of(one, n, module, pair=pair)
                for normed in () if config is None else (False, True) if config[0].normed else (False,):
                    cut = None if config is None else config[0]
                    own_options = gemv4.options(one[0], dtype, cut, members=len(one), pair=pair, normed=normed)
                    variants[cut is not None and cut.held > 0][own_options] = None
            for n in checked:
                plain = gemv4.choose(one, n, module)
                variants[plain.held > 0][gemv4.options(one[0], dtype, plain, members=len(one))] = None
    source = gemv4.source()
    return wanted + [Job(source, (*options, *module.common), "matvec4.cu") for some in variants for options in some]


def compile_ahead(
    weights: Sequence[tuple[Sequence[Packed], bool]], attention: Sequence[attention_and_norms.AttentionShape], device: torch.device,
    dtype: torch.dtype, *, checked: Sequence[int], counts: Sequence[int], has_many: bool = False,
    norm: gemv4.NormForm = gemv4.PLAIN, others: Sequence[Job] = (),
) -> bool:  # fmt: skip
    """Compile the sources and variants that `jobs` returns for a device, and others, in parallel; whether that was done. One that
    does not compile is named by its check. NVRTC takes 0.3 to 4 s for each of about 30 variants of a new model and holds no Python
    lock: compiled one by one they take 12 s of a first load (E4B, H200)."""
    if nvrtc.why_not(device) is not None or not nvrtc.keeps_compiled():
        return False
    with suppress(DeviceError):  # the next load reports the reason
        module = gemv4.load(device, norm)
        try:
            wanted = jobs(weights, attention, module, dtype, checked=checked, counts=counts, has_many=has_many)
            nvrtc.compile_all([*others, *wanted], module.capability)
            return True
        finally:
            module.close()
    return False


def compile_cuts(
    wanted: Sequence[tuple[Sequence[Packed], bool, LaunchConfig]], module: nvrtc.Module, dtype: torch.dtype, *, fixed: bool = False
) -> None:
    """Compile, several at once, the kernels that these products (weights, whether two are multiplied, cut) need. fixed: as
    `gemv4.LoraArgs.is_fixed`."""
    variants = {
        gemv4.options(weights[0], dtype, cut, members=len(weights), pair=pair, normed=normed, fixed=fixed)
        for weights, pair, cut in wanted for normed in ((False, True) if cut.normed else (False,))
    }  # fmt: skip
    module.compile_variants(sorted(variants))


def keep_tuned(module: nvrtc.Module) -> None:
    """Keep the cuts that were measured on this card for later processes."""
    shipped_configs.keep(gemv4.target_of(module), gemv4.tuned_cuts(module))


def releases() -> dict[str, str]:
    """Return the releases and the card of a measurement."""
    return {"torch": str(torch.__version__), "driver": str(nvrtc.driver_version())}
