"""Which kernels of trimtab compile, compute correctly and are faster for a model on this machine?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.cuda import launch_config, shipped_configs
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.cuda.launch_config import CutKey, LaunchConfig
from trimtab.engine.formats.packed import LayerProduct, Matmul, Packed
from trimtab.engine.kernels import (
    attention_and_norms,
    autotune,
    delta_rule,
    embed_and_logits,
    experts,
    gemm4,
    gemv4,
    layouts,
    routers,
    selfcheck,
)
from trimtab.engine.kernels.delta_rule import DeltaShape
from trimtab.engine.kernels.dequantize import packed_heads
from trimtab.engine.kernels.embed_and_logits import Sizes
from trimtab.engine.kernels.experts import Mixture
from trimtab.engine.kernels.gemv4 import PLAIN, NormForm
from trimtab.engine.kernels.selfcheck import KernelFamily, Times, exact_changes, first_reason, random_values
from trimtab.engine.layers.leaves import Leaf, ResidentLeaf
from trimtab.formats.record import DEQUANTIZED_VALUES, stored_format
from trimtab.planning.values.execution import CHECK_BYTES, KERNEL_ROWS, PRODUCT_ROWS

if TYPE_CHECKING:
    from trimtab.engine.cuda import nvrtc
    from trimtab.engine.formats.hf_types import HFModel

Progress = Callable[[int, int], None]
# How many experts a token has and what opens each, by what selects its kernels.
Mixtures = Mapping[tuple[object, ...], tuple[int, Callable[[], Mixture]]]
# The matrix-vector kernels decode each weight once for up to this many rows.
MOST_ROWS = launch_config.MAX_ROWS
# Checked at one row, at an odd number and at the most.
_ROWS = (1, 3, MOST_ROWS)
_CALLS = 10
TRIED = 9  # ways to cut a product that are timed
MOST_INSTEAD = 6  # ways that are tried where a configuration cannot run
SMALL, PRODUCTS, ADAPTERS = "fused small kernels", "fused 4-bit products", "adapters by table"
ENDS = "fused ends of a step"
DELTA = "gated delta rule"
EXPERTS = "chosen experts"
ROWS = "4-bit products of many rows"
PAGES = "attention over pages"
UNREAD = "no layer of this model is in a form that they read"
# Rows of a product of many that is timed.
TIMED_ROWS = 32


@dataclass(frozen=True, eq=False)
class Product:
    """One product of 4-bit weights for a number of rows. groups: the weights of every group of layers that has its shape. gate:
    the activation of a pair, None for independent layers."""

    groups: list[list[Packed]]
    n: int
    gate: str | None

    @property
    def key(self) -> CutKey:
        return gemv4.cut_key(self.groups[0], self.n, pair=self.gate is not None)


@dataclass(eq=False)
class DeviceKernels:
    """The compiled modules, None where plain torch is used. small: norms, rotation, attention, gates. matvec: products of
    4-bit weights and LoRA. rows: the same for steps of more rows (`with_rows`). delta: the gated delta rule. experts: chosen ones.
    ends: tables in front of the layers, scores behind the head. left_out: name -> reason.
    measured_us: name -> (ours, torch's or bitsandbytes') for one row.
    configs: how each product's launch configuration is known (shipped_configs.py); rejected: those not used here, and why.
    overlap_pays: whether a step is faster when kernels begin while the one before ends; None until it was measured.
    checks: those that passed on this card before.
    """

    small: nvrtc.Module | None = None
    matvec: nvrtc.Module | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    measured_us: Times = field(default_factory=dict)
    overlap_pays: bool | None = None
    ends: nvrtc.Module | None = None
    rows: nvrtc.Module | None = None
    delta: nvrtc.Module | None = None
    experts: nvrtc.Module | None = None
    configs: dict[CutKey, str] = field(default_factory=dict)
    rejected: dict[CutKey, str] = field(default_factory=dict)
    checks: CardEntries = field(default_factory=CardEntries)

    @contextmanager
    def overlapping(self, wanted: bool) -> Iterator[None]:
        """Let launches overlap, or not, while the block runs: for a capture."""
        modules = [one for one in (self.small, self.matvec, self.ends, self.rows, self.delta, self.experts) if one is not None]
        for module in modules:
            module.overlap = wanted
        try:
            yield
        finally:
            for module in modules:
                module.overlap = False

    @property
    def made_of(self) -> str:
        """Which modules and launch configurations there are, as text."""
        modules = [one is not None for one in (self.small, self.matvec, self.ends, self.rows, self.delta, self.experts)]
        return repr([modules, sorted((key, str(self._compiled.products.chosen[key])) for key in self.configs)])

    @staticmethod
    def none() -> DeviceKernels:
        return DeviceKernels()

    @staticmethod
    def for_adapters(device: torch.device, dtype: torch.dtype) -> DeviceKernels:
        """Return the kernels that choose adapters by table, for a step that stays with the model's own modules."""
        chosen, key = of_this_process().for_adapters, (str(device), dtype)
        if key not in chosen:
            checks, left_out = CardEntries.of(device), dict[str, str]()
            compiled = KernelFamily(
                ADAPTERS, (str(dtype),), partial(gemv4.load, device), partial(wrong_lora, dtype=dtype),
                lambda _: layouts.why_not_type(dtype),
            ).choose(checks, left_out, {})  # fmt: skip
            checks.save()
            chosen[key] = DeviceKernels(None, compiled, left_out, checks=checks)
        return chosen[key]

    @property
    def has_lora(self) -> bool:
        """Whether adapters can be chosen by table."""
        return self.matvec is not None

    @property
    def _compiled(self) -> nvrtc.Module:
        assert self.matvec is not None
        return self.matvec

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the layers; the ends alone do not justify our step."""
        return self.small is None and self.matvec is None

    @staticmethod
    def choose(
        groups: Sequence[Sequence[Sequence[Leaf]]], attention: Sequence[attention_and_norms.AttentionShape], *, rows: int,
        sizes: Sizes | None = None, norm: NormForm = PLAIN, progress: Progress | None = None,
        deltas: Sequence[DeltaShape] = (), mixtures: Mixtures | None = None,
    ) -> DeviceKernels:  # fmt: skip
        """Return the kernels that work and are faster for layers like these on their device, for steps of up to `rows` rows.

        groups: for every shape the groups of linear layers that have it; a group reads one input. attention: of each
        kind of layer. norm: of the model. sizes: of the step's two ends, which stay with torch without them.
        progress: called with (done, of) while they are measured.
        """
        leaf = groups[0][0][0]
        shapes = [(one[0][0].in_features, *((leaf.out_features, leaf.quant_kind) for leaf in one[0])) for one in groups]
        known = of_this_process().for_layers
        others = (*deltas, *(mixtures or ()))
        key = LayerShapes(str(leaf.device), leaf.dtype, tuple(attention), tuple(shapes), sizes, norm, others)
        if key not in known:
            known[key] = _choose(groups, attention, sizes, rows, norm, deltas, mixtures or {})
        chosen = known[key]
        if chosen.matvec is not None:
            chosen.prepare(groups, leaf.dtype, [n for n in PRODUCT_ROWS if n <= rows], progress=progress)
        chosen.checks.save()
        return chosen

    def products(self, groups: Sequence[Sequence[Sequence[Leaf]]], dtype: torch.dtype, counts: Sequence[int]) -> list[Product]:
        """Return the products that our kernels compute, for every number of rows."""
        products = []
        for one in groups:
            # A streamed layer's weight is there until the next is requested.
            resident = [group for group in one if all(isinstance(leaf, ResidentLeaf) for leaf in group)]
            packed = [[leaf.packed() for leaf in group] for group in (resident or one[:1])]
            for part in layouts.runs(packed[0]):
                if not gemv4.why_not(packed[0][part][0], dtype, self._compiled.device):
                    products += [Product([group[part] for group in packed], n, pair_kind(one[0])) for n in counts]
        return products

    def prepare(
        self, groups: Sequence[Sequence[Sequence[Leaf]]], dtype: torch.dtype, counts: Sequence[int], *,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """Set each product's launch configuration without timing: tuned on this card, shipped, or the best estimate.

        The kernels are compiled in parallel, or read from the cache. A configuration that was not tuned here must fit the
        card's shared memory and registers and compute the result of the plain kernel; otherwise the plain kernel is used.
        """
        ready: set[CutKey] = self._compiled.products.prepared
        wanted = [one for one in self.products(groups, dtype, counts) if one.key not in ready]
        if not wanted:
            return
        report = progress or (lambda done, of: None)
        report(0, 2 * len(wanted))
        # Without any `choose` reports why nothing fits.
        known = [(one, config) for one in wanted if (config := self._config_of(one, dtype)) is not None]

        def compile_cuts(cuts_of: Iterable[tuple[Product, LaunchConfig]]) -> None:
            autotune.compile_cuts([(one.groups[0], one.gate is not None, cut) for one, cut in cuts_of], self._compiled, dtype)

        compile_cuts((one, config[0]) for one, config in known)
        refused = [(one, config[0]) for one, config in known if self._lacks_room(one, *config, dtype)]
        compile_cuts((one, cut) for one, first in refused for cut in self._instead_of(one, first))
        for number, (one, config) in enumerate(known):
            report(len(wanted) + number, 2 * len(wanted))
            if one.key in self.rejected or not self._takes(one, *config, dtype):
                any(self._takes(one, cut, shipped_configs.ESTIMATED, dtype) for cut in self._instead_of(one, config[0]))
        ready.update(one.key for one in wanted)
        for group in groups:
            self.measure(group[0], dtype)
        report(2 * len(wanted), 2 * len(wanted))

    def compile_fixed(self, groups: Sequence[Sequence[Sequence[Leaf]]], dtype: torch.dtype, rows: int) -> None:
        """Compile, several at once, the products of steps of `rows` rows whose bits do not depend on the others' adapters."""
        if self.matvec is None:
            return
        chosen = self._compiled.products.chosen
        products = [one for one in self.products(groups, dtype, [rows]) if one.key in chosen]
        autotune.compile_cuts(
            [(one.groups[0], one.gate is not None, chosen[one.key]) for one in products], self._compiled, dtype, fixed=True
        )

    def _config_of(self, one: Product, dtype: torch.dtype) -> tuple[LaunchConfig, str] | None:
        """Return a product's launch configuration, and how it is known: as `gemv4.config_of`, or as it was checked before."""
        kept = None if gemv4.is_tuned_before(one.groups[0], one.n, self._compiled, pair=one.gate is not None) else (
            self.checks.find(*self._config_key(one, dtype))
        )  # fmt: skip
        if kept is not None:
            return LaunchConfig(**kept["cut"]), kept["status"]
        return gemv4.config_of(one.groups[0], one.n, self._compiled, pair=one.gate is not None)

    def _config_key(self, one: Product, dtype: torch.dtype) -> tuple[object, ...]:
        form, has_small = _form_of(one.groups[0]), self.small is not None
        return "configuration", one.key, form, str(dtype), one.gate, has_small, self._compiled.products.norm

    def _instead_of(self, one: Product, cut: LaunchConfig) -> list[LaunchConfig]:
        return instead_of(cut, gemv4.ways(one.groups[0], one.n, self._compiled, pair=one.gate is not None))

    def _lacks_room(self, one: Product, cut: LaunchConfig, status: str, dtype: torch.dtype) -> bool:
        """Whether a configuration that no process checked here needs more registers or memory than the card has: `rejected`."""
        if status == shipped_configs.MEASURED or self.checks.find(*self._config_key(one, dtype)) is not None:
            return False
        is_timed, is_pair = status == shipped_configs.SHIPPED, one.gate is not None
        why = autotune.why_no_room(one.groups[0], self._compiled, cut, dtype=dtype, pair=is_pair, is_timed=is_timed)
        if why is not None:
            self.rejected[one.key] = why
        return why is not None

    def _takes(self, one: Product, cut: LaunchConfig, status: str, dtype: torch.dtype) -> bool:
        """Take a configuration for a product if this card can run it, and record for later processes that it can."""
        key = self._config_key(one, dtype)
        if status != shipped_configs.MEASURED and self.checks.find(*key) is None:
            why = autotune.why_not_cut(
                one.groups[0], one.n, self._compiled, cut, dtype=dtype, gate=one.gate, small=self.small,
                is_timed=status == shipped_configs.SHIPPED,
            )  # fmt: skip
            if why is not None:
                self.rejected.setdefault(one.key, why)
                return False
            self.checks.keep({"cut": asdict(cut), "status": status}, *key)
        self._compiled.products.chosen[one.key] = cut
        self.configs[one.key] = status
        return True

    @property
    def plain_products(self) -> dict[str, str]:
        """Which products are left to the kernel that is not compiled for their shape, and why: name -> reason."""
        return {
            f"4-bit matmul {' + '.join(map(str, key[1]))} x {key[2]}, {key[3]} rows": why
            for key, why in self.rejected.items() if key not in self.configs and key not in self._compiled.products.measured
        }  # fmt: skip

    def tune(
        self, groups: Sequence[Sequence[Sequence[Leaf]]], dtype: torch.dtype, counts: Sequence[int], *,
        progress: Progress | None = None,
    ) -> int:  # fmt: skip
        """Measure which way to cut each product is fastest on this card and keep that for later processes; return how many."""
        wanted = self.products(groups, dtype, counts)
        products = [(one.groups[0], one.n, one.gate is not None) for one in wanted]
        report = progress or (lambda done, of: None)
        if wanted:
            report(0, 2 * len(wanted))
        autotune.compile_tried(products, self._compiled, dtype, limit=TRIED)  # about half of the time
        for number, one in enumerate(wanted):
            report(len(wanted) + number, 2 * len(wanted))
            autotune.tune(one.groups, one.n, self._compiled, dtype=dtype, gate=one.gate, limit=TRIED, repeat=2, small=self.small)
        if wanted:
            for group in groups:
                self.measure(group[0], dtype)
            autotune.keep_tuned(self._compiled)
            self.checks.save()
            report(2 * len(wanted), 2 * len(wanted))
        return len(wanted)

    def with_rows(self, leaves: Sequence[Leaf], dtype: torch.dtype) -> DeviceKernels:
        """Choose the kernels for steps of more rows than the matrix-vector kernels take, once; returns itself. leaves: the layers
        over 4-bit weights."""
        if self.rows is not None or ROWS in self.left_out or not leaves:
            return self
        shapes = {(leaf.out_features, leaf.in_features, leaf.quant_kind): leaf for leaf in leaves}

        def read() -> list[Leaf]:  # others stay with their own products
            return [leaf for leaf in shapes.values() if gemm4.why_not(leaf.packed(), dtype) is None]

        self.rows = KernelFamily(
            ROWS, ([_form_of([leaf.packed()]) for leaf in shapes.values()], str(dtype)), partial(gemm4.load, leaves[0].device),
            lambda module: first_reason(gemm4.wrong([leaf.packed()], module, dtype) for leaf in read()),
            lambda module: first_reason(gemm4.why_no_room(module, leaf.quant_kind) for leaf in read()) if read() else UNREAD,
            lambda module: {f"{TIMED_ROWS} rows: {shape_of([leaf])}": _rows_us(module, leaf, dtype) for leaf in read()},
            theirs="the layers' own", of=f" for {TIMED_ROWS} rows",
        ).choose(self.checks, self.left_out, self.measured_us)  # fmt: skip
        for leaf in {leaf.quant_kind: leaf for leaf in leaves}.values():
            if self.rows is not None:
                layouts.variant(leaf.packed(), self.rows)  # a capture finds it compiled
        self.checks.save()
        return self

    def why_no_pages(self, kinds: Sequence[attention_and_norms.AttentionShape], dtype: torch.dtype) -> str | None:
        """Return why attention over pages is not used, None if it is or torch computes it. Not kept: the check compiles it."""
        if (small := self.small) is None:
            return None
        family = KernelFamily(PAGES, None, lambda: small, lambda module: selfcheck.check_pages(module, kinds, dtype))
        return family.choose_alone(small.device)[1]

    def measure(self, group: Sequence[Leaf], dtype: torch.dtype) -> tuple[float, float]:
        """Measure a group's product for one row: µs of ours and of the layers' own."""
        packed = [leaf.packed() for leaf in group]
        if any(gemv4.why_not(one, dtype, self._compiled.device) for one in packed):
            return 0.0, 0.0  # the group stays with its own layers
        x = torch.randn(1, packed[0].shape[1], device=self._compiled.device).to(dtype)
        kind = pair_kind(group)
        cut = [gemv4.choose(packed[part], 1, self._compiled, pair=kind is not None) for part in layouts.runs(packed)]
        key = (
            "time of a product", _form_of(packed), str(dtype), kind, [isinstance(leaf, ResidentLeaf) for leaf in group],
            ", ".join(map(str, cut)),
        )  # fmt: skip
        before = self.checks.find(*key)
        if before is not None:
            self.measured_us[shape_of(group)] = before["ours"], before["theirs"]
            return self.measured_us[shape_of(group)]
        width = packed[0].shape[0] if kind else sum(one.shape[0] for one in packed)
        out = torch.empty(1, width, device=x.device, dtype=dtype)
        gate = None if kind is None else gemv4.Gate(kind)
        ours = partial(gemv4.matvec4, x, packed, out, gate=gate, module=self._compiled)
        # In a step they overlap where the card can do that, and start while another one ends.
        best = autotune.graph_us(ours, x.device, calls=_CALLS)
        if self._compiled.capability >= (9, 0):
            with self.overlapping(True):
                best = min(best, autotune.graph_us(ours, x.device, calls=_CALLS))
        known = self.measured_us.get(shape_of(group))  # of another cut
        theirs = autotune.graph_us(partial(_own_layers, group, x), x.device, calls=_own_calls(group)) if known is None else known[1]
        pair = best, theirs
        self.measured_us[shape_of(group)] = pair
        self.checks.keep({"ours": pair[0], "theirs": pair[1]}, *key)
        return pair

    def head_matmuls(self, hf_model: HFModel) -> list[Matmul[LayerProduct] | None]:
        """Return the ways to multiply with a packed head, which no pass unpacks."""
        heads = packed_heads(hf_model)
        return [gemv4.matmul(heads, self.matvec), gemm4.matmul(heads, self.rows, least=2, most=gemm4.MOST_TOKENS)]

    def pays(self, group: Sequence[Leaf]) -> bool:
        """Whether one launch of ours is worth it for a group of this shape; a little slower, it still saves the adapters'
        own launches."""
        ours, theirs = self.measured_us.get(shape_of(group), (0.0, 0.0))
        return ours <= theirs * 1.1 + 2.0


def check_bytes(attention: Sequence[attention_and_norms.AttentionShape], dtype: torch.dtype) -> int:
    """Return how many bytes of the device choosing kernels takes for a while. attention: as for `DeviceKernels.choose`."""
    return max(CHECK_BYTES, selfcheck.check_bytes(attention, dtype, rows=MOST_ROWS))


def pair_kind(group: Sequence[Leaf]) -> str | None:
    """Return the activation that a timing of this group ends with: two layers of one size are gate and up."""
    gate, up = group[0], group[-1]
    is_pair = len(group) == 2 and gate.out_features == up.out_features and gate.quant_kind == up.quant_kind
    return "gelu_tanh" if is_pair else None


def instead_of(cut: LaunchConfig, ways: Sequence[LaunchConfig]) -> list[LaunchConfig]:
    """Return which configurations are tried where this one cannot run: those of the same blocks that hold fewer weights in
    registers, then the best estimates."""
    blocks = (cut.units, cut.k_warps, cut.groups, cut.splits)
    smaller = [one for one in ways if 0 < one.held < cut.held and (one.units, one.k_warps, one.groups, one.splits) == blocks]
    smaller.sort(key=lambda one: -one.held)
    others = [one for one in launch_config.unlike(ways, MOST_INSTEAD) if one.held]
    tried = {replace(cut, estimated_us=0.0)}
    return [one for one in dict.fromkeys((*smaller, *others)) if replace(one, estimated_us=0.0) not in tried][:MOST_INSTEAD]


def shape_of(group: Sequence[Leaf]) -> str:
    """Return the name of a product: its layers' outputs, their input and their formats, one where all are the same. A model has
    groups of the same sizes in several formats, and the time of each has its own name."""
    kinds = [leaf.quant_kind for leaf in group]
    formats = ", ".join(kinds if len(set(kinds)) > 1 else kinds[:1])
    return f"{' + '.join(str(leaf.out_features) for leaf in group)} x {group[0].in_features} ({formats})"


@dataclass(frozen=True)
class LayerShapes:
    """The key of the choice of kernels: the device, and the shapes of everything that a step computes there.

    attention: of each kind of layer. linear: for each group of layers its input, its outputs and its
    format. step_ends: of both ends of a step, None where they stay with torch. deltas: recurrent layers, and mixtures of experts.
    """

    device: str
    dtype: torch.dtype
    attention: tuple[attention_and_norms.AttentionShape, ...]
    linear: tuple[tuple[object, ...], ...]
    step_ends: embed_and_logits.Sizes | None
    norm: NormForm
    deltas: tuple[object, ...]


@dataclass(eq=False)
class ChosenKernels:
    """The kernels that were compiled and checked in a process: code is loaded into the device's context, which its models share."""

    for_layers: dict[LayerShapes, DeviceKernels] = field(default_factory=dict)
    for_adapters: dict[tuple[str, torch.dtype], DeviceKernels] = field(default_factory=dict)


@cache
def of_this_process() -> ChosenKernels:
    """Return the process's kernels: a second model of the same shapes compiles and checks nothing."""
    return ChosenKernels()


def _choose(
    groups: Sequence[Sequence[Sequence[Leaf]]], attention: Sequence[attention_and_norms.AttentionShape], sizes: Sizes | None,
    rows: int = 1, norm: NormForm = PLAIN, deltas: Sequence[DeltaShape] = (), mixtures: Mixtures | None = None,
) -> DeviceKernels:  # fmt: skip
    first = [one[0] for one in groups]
    device, dtype = first[0][0].device, first[0][0].dtype
    left_out: dict[str, str] = {}
    measured: Times = {}
    checks = CardEntries.of(device)
    forms = [(_form_of([leaf.packed() for leaf in group]), pair_kind(group)) for group in first]
    counts, has_many = [n for n in PRODUCT_ROWS if n <= rows], rows > KERNEL_ROWS
    compiled = "compiled ahead", str(dtype), forms, list(attention), norm, counts, has_many, list(deltas), list(mixtures or ())
    if device.type == "cuda" and checks.find(*compiled) is None:
        others = [delta_rule.job(one, dtype) for one in deltas]
        others += [one for _, opened in (mixtures or {}).values() for one in experts.jobs(opened(), dtype)]
        is_done = autotune.compile_ahead(
            [([leaf.packed() for leaf in group], pair_kind(group) is not None) for group in first], attention, device, dtype,
            checked=_ROWS, counts=counts, has_many=has_many, norm=norm, others=others,
        )  # fmt: skip
        if is_done:
            checks.keep({}, *compiled)

    def tried(family: KernelFamily) -> nvrtc.Module | None:
        return family.choose(checks, left_out, measured)

    kind = str(dtype)
    widths, time_us = sorted({group[0].in_features for group in first}), partial(autotune.graph_us, device=device, calls=_CALLS)
    small = tried(KernelFamily(
        SMALL, (kind, forms, list(attention), norm), lambda: attention_and_norms.load(device),
        lambda module: (
            selfcheck.check(module, widths=widths, attention=attention, norm=norm, dtype=dtype, rows=_ROWS)
            or routers.check(module, 128, 320, routers.Choice(8), dtype)
        ),
        lambda _: first_reason(attention_and_norms.why_not(*shape[:3], dtype) for shape in attention),
        lambda module: selfcheck.measure(
            module, time_us, width=widths[0], mlp=widths[-1], attention=attention, dtype=dtype
        ), of=" for one layer",
    ))  # fmt: skip
    if all(stored_format(leaf.quant_kind).layout is None for group in first for leaf in group):  # but adapters by table
        tables = DeviceKernels.for_adapters(device, dtype)
        products, left_out = tables.matvec, left_out | tables.left_out
    else:

        def read() -> list[Sequence[Leaf]]:  # others stay with their own layers
            return [one for one in first if not any(gemv4.why_not(leaf.packed(), dtype, device) for leaf in one)]

        products = tried(KernelFamily(
            PRODUCTS, (kind, forms, norm), lambda: gemv4.load(device, norm),
            lambda module: first_reason(
                autotune.check([leaf.packed() for leaf in group], module, dtype=dtype, rows=_ROWS) for group in read()
            ),
            lambda _: None if read() else UNREAD, lambda module: _products_us(module, read(), dtype),
            theirs="bitsandbytes'", of=" for one layer", is_each=True,
        ))  # fmt: skip
    delta = mixed = step_ends = None
    if len(deltas) == 1:  # of one shape in all families
        delta = tried(KernelFamily(
            DELTA, (kind, *deltas), lambda: delta_rule.load(device, deltas[0], dtype),
            lambda module: delta_rule.check(module, deltas[0], dtype), lambda _: delta_rule.why_not(deltas[0], dtype),
        ))  # fmt: skip
    if mixtures:
        mixed = tried(KernelFamily(
            EXPERTS, (kind, list(mixtures)), lambda: experts.load(device),
            lambda module: first_reason(experts.check(module, *one, dtype) for one in _opened(mixtures)),
            lambda _: first_reason(experts.why_not(one, 1, top_k, dtype, device) for one, top_k in _opened(mixtures)),
        ))  # fmt: skip
        if mixed is not None:
            for _, opened in mixtures.values():
                experts.compiled(mixed, opened(), dtype)  # a capture finds them
    if sizes is not None and not (small is None and products is None):
        step_ends = tried(KernelFamily(
            ENDS, (kind, sizes), lambda: embed_and_logits.load(device),
            lambda module: embed_and_logits.check(module, sizes, dtype=dtype, rows=_ROWS),
            lambda _: embed_and_logits.why_not(sizes, dtype),
            lambda module: embed_and_logits.measure(module, time_us, sizes, dtype=dtype), of=" for both ends",
        ))  # fmt: skip
    return DeviceKernels(small, products, left_out, measured, ends=step_ends, delta=delta, experts=mixed, checks=checks)


def _form_of(weights: Sequence[Packed]) -> tuple[object, ...]:
    """Return the properties of packed weights that select their kernel, as values that print the same in every process."""
    return tuple((one.kind, tuple(one.shape), one.blocks, sorted(one.parts), *layouts.scale_type(one)) for one in weights)


def _opened(mixtures: Mixtures) -> Iterator[tuple[Mixture, int]]:
    """Yield each mixture and how many experts a token has. A streamed one is there until another weight is opened."""
    for top_k, opened in mixtures.values():
        one = opened()
        yield one, min(top_k, one.down.shape[0])


def _products_us(module: nvrtc.Module, groups: Sequence[Sequence[Leaf]], dtype: torch.dtype) -> Times:
    kernels = DeviceKernels(matvec=module)
    for group in groups:
        kernels.measure(group, dtype)
    return kernels.measured_us


def _rows_us(module: nvrtc.Module, leaf: Leaf, dtype: torch.dtype) -> tuple[float, float]:
    x = torch.randn(TIMED_ROWS, leaf.in_features, device=module.device).to(dtype)
    out = torch.empty(TIMED_ROWS, leaf.out_features, dtype=dtype, device=module.device)
    ours, theirs = partial(gemm4.linear, x, [leaf.packed()], out, module=module), partial(leaf.base, x)
    return autotune.pair_us(ours, theirs, module.device, calls=_own_calls([leaf]))


def wrong_lora(module: nvrtc.Module, dtype: torch.dtype) -> str | None:
    """Return the error of the adapters' kernels: random ones of two ranks, rows with and without, in float64."""
    device, wide, high = module.device, 192, 320
    random = random_values(device, 1)
    adapters = [(random(rank, wide) / wide**0.5, random(high, rank), 0.5) for rank in (8, 24)]
    for n in _ROWS:
        numbers = [i % 3 - 1 for i in range(n)]
        args = gemv4.lora_args([adapters], torch.tensor(numbers, dtype=torch.int32, device=device), 32)
        x, before = random(n, wide).to(dtype), random(n, high).to(dtype)
        y = before.clone()
        gemv4.lora_add(y, args, module, x=x)
        wanted = before.double() + exact_changes(x, adapters, numbers)
        if (error := autotune.relative_error(y, wanted)) > autotune.LARGEST_ERROR:
            return f"{n} rows of {wide} values: relative error {error:.1e}"
    return None


def _own_calls(group: Sequence[Leaf]) -> int:
    """Return how many calls of layers' own products are timed in one graph: a weight that torch dequantizes takes tens of launches
    for every piece of it, milliseconds for one call, and a graph of ten calls of a head 140,000 nodes."""
    values = sum(leaf.out_features * leaf.in_features for leaf in group if stored_format(leaf.quant_kind).is_own)
    return max(1, _CALLS // max(1, values // DEQUANTIZED_VALUES))


def _own_layers(group: Sequence[Leaf], x: Tensor) -> None:
    for leaf in group:
        leaf.base(x)
