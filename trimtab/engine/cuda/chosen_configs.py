"""The launch configurations of one module's 4-bit products: chosen, known from earlier, and measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trimtab.engine.cuda.launch_config import CutKey, LaunchConfig


@dataclass(eq=False)
class ProductCuts:
    """The launch configurations of a module's products, by product.

    chosen: in use. known: tuned on this card by an earlier process, with how they were measured. shipped: those of this package,
    with the same; None until they are read. measured: products that were tuned on this card, now or before. prepared:
    products whose configuration was set. tables: address of a code -> (the weights of each byte value [256, 2] float16, the code).
    """

    chosen: dict[CutKey, LaunchConfig] = field(default_factory=dict)
    known: dict[CutKey, tuple[LaunchConfig, str]] = field(default_factory=dict)
    shipped: tuple[dict[CutKey, LaunchConfig], str] | None = None
    measured: set[CutKey] = field(default_factory=set)
    prepared: set[CutKey] = field(default_factory=set)
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
