"""How do stacked experts compute where transformers' forward is not enough: packed stacks, and adapters of each row?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from trimtab.adapters.stack_layout import Stack
from trimtab.engine.formats.packed import Packed, keep
from trimtab.engine.formats.weights import dequantize, shell
from trimtab.engine.lora.store import AdapterStore, Groups
from trimtab.engine.tiers.reader import Part
from trimtab.engine.tiers.streaming import Staged
from trimtab.errors import DeviceError

DOWN = "down_proj"
_GATE, _ACTIVATION, _NORM, _COUNT = "_apply_gate", "act_fn", "post_expert_norm", "num_experts"


def why_no_lora(module: nn.Module) -> str | None:
    """Return why this package does not know how a module of stacked experts computes, None if it does."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_gate", "num_experts")):
        return f"{type(module).__name__} does not follow transformers' experts interface"
    # A streamed stack is a property: reading it here would bring its block in.
    known = all(name in {**module._parameters, **vars(module)} or hasattr(type(module), name) for name in (DOWN, _first(module)))
    return None if known else f"the stacks of {type(module).__name__} have other names"


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if bool(module.has_gate) else "up_proj"


def matrices(stack: Stack, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A [n, R, D_in] and B [n, D_out, R] of the stack's experts that have a pair. tensors: by role, as in the file."""
    if "A" not in tensors:
        A, B = (torch.stack([tensors[f"{role}.{expert}"].flatten(0, -2) for expert in stack.experts]) for role in "AB")
        return A, B
    A, B, count = tensors["A"], tensors["B"], len(stack.experts)
    if A.dim() == 2:
        A = A.reshape(count, -1, A.shape[-1])
        if stack.is_expert_first:
            B = B.reshape(B.shape[0], count, -1).permute(1, 0, 2)
        else:
            B = B.reshape(B.shape[0], -1, count).permute(2, 0, 1)
    A, B = (matrix.expand(count, -1, -1) for matrix in (A, B))  # one may be shared
    return (B.transpose(1, 2), A.transpose(1, 2)) if stack.is_swapped else (A, B)


@dataclass(frozen=True, eq=False)
class ExpertProduct:
    """The product of one expert with one stack, as an applier and the adapters of its module see it."""

    adapters: Mapping[str, object]
    adapter_store: AdapterStore
    parameter: str
    expert: int
    quant_kind: ClassVar[str] = "none"
    bias: ClassVar[None] = None


class _Forward:
    """The forward of one module of experts that has adapters, or whose stacks are packed (`plain` is then None).

    An adapter adds scale B A x to stock's products, so the stacks stay as they are; PEFT adds B A to the weight and rounds there.
    The chosen experts are read on the host: such a step cannot be captured. Source: transformers 5.23.0, integrations/moe.py,
    grouped_mm_experts_forward; PEFT 0.21.2, ParamWrapper.get_delta_weight.
    """

    def __init__(self, module: nn.Module, store: AdapterStore, plain: Callable[..., Tensor] | None) -> None:
        self.module, self.store, self.plain = module, store, plain
        gate = _GATE if bool(module.has_gate) else _ACTIVATION
        self.activation: Callable[[Tensor], Tensor] = getattr(module, gate)
        self.count: int = getattr(module, _COUNT)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        own = self.module.__dict__
        adapters: Mapping[str, object] = own.get("adapters", {})
        selection = self.store.selection
        used = [name for name in dict.fromkeys(selection.active()) if name is not None and name in adapters]
        if not used and (self.plain is not None or "stacks" not in own):
            return (self.plain or type(self.module).forward.__get__(self.module))(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if len(given) != 3 or given[0].dim() != 2 or given[1].dim() != 2:
            shapes = [list(one.shape) for one in given if isinstance(one, Tensor)]
            raise DeviceError(
                f"the experts got inputs {shapes}, known are tokens, indices and weights, [N, D], [N, K], [N, K]",
                device=str(given[0].device), block=own["module_path"],
            )  # fmt: skip
        x, index, weights = given
        if selection.rows is None or not used:
            return self._run(x, index, weights, used, None)
        rows = len(selection.rows)
        count = rows if x.shape[0] % rows == 0 else x.shape[0]
        groups = selection.groups(own["part"], count, x.device)
        numbers = torch.full((count,), -1, device=x.device)
        for name, places in groups:
            if name in used:
                numbers[places] = used.index(name)
        return self._run(x, index, weights, used, numbers.repeat_interleave(x.shape[0] // count))

    def _run(
        self, x: Tensor, index: Tensor, weights: Tensor, names: Sequence[str], numbers: Tensor | None
    ) -> Tensor:  # fmt: skip
        """Return the output [N, D]. numbers: of each token's adapter in `names` [N], -1 for the base; None: all have the same."""
        most = index.shape[1]
        norm: Callable[[Tensor], Tensor] | None = getattr(self.module, _NORM, None)
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)
        tokens, start = order // most, 0
        sums = x.new_zeros(flat.numel(), x.shape[1], dtype=torch.promote_types(x.dtype, weights.dtype))
        for expert, count in enumerate(torch.bincount(flat, minlength=self.count).tolist()[: self.count]):
            if not count:
                continue
            chosen, of = order[start : start + count], tokens[start : start + count]
            start += count
            groups = None if numbers is None else [
                (name, own) for number, name in enumerate(names) if len(own := (numbers[of] == number).nonzero()[:, 0])
            ]  # fmt: skip
            y = self.activation(self._product(_first(self.module), expert, x[of], groups))
            y = self._product(DOWN, expert, y, groups)
            y = y if norm is None else norm(y)
            sums[chosen] = (y * weights.reshape(-1)[chosen, None]).to(sums.dtype)
        return sums.view(*index.shape, x.shape[1]).sum(dim=1).to(x.dtype)

    def _product(self, name: str, expert: int, x: Tensor, groups: Groups | None) -> Tensor:
        stack: Packed | Tensor = stack_of(self.module, name)
        where = stack if isinstance(stack, Tensor) else stack.parts["weight"]
        # Of a packed stack: of the type in which the model computes.
        dtype = stack.dtype if isinstance(stack, Tensor) else self.module.__dict__[name].dtype
        one = keep(stack[expert]) if isinstance(stack, Tensor) else stack.expert(expert)
        if self.module.is_transposed:
            one = keep(dequantize(one).to(dtype).T)
        bias = getattr(self.module, f"{name}_bias")[expert] if getattr(self.module, "has_bias", False) else None
        y = shell(one, None, dtype)(x.to(device=where.device, dtype=dtype))
        y = (y if bias is None else y + bias).to(x.device)
        product = ExpertProduct(self.module.__dict__.get("adapters", {}), self.store, name, expert)
        return self.store.applier.apply(product, x, y, groups)


def stack_of(module: nn.Module, name: str) -> Packed | Tensor:
    """Return a stack [E, D_out, D_in] as it is stored; a streamed block is entered."""
    stacks: Mapping[str, Packed | Staged] = module.__dict__.get("stacks", {})
    if (held := stacks.get(name)) is None:
        stack: Tensor = getattr(module, name)
        return stack
    return held if isinstance(held, Packed) else held.open()[1]


def stack_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return the shape of a stack; a streamed block is not entered."""
    held: Packed | Staged | None = module.__dict__.get("stacks", {}).get(name)
    return tuple((_unpacked(module, name) if held is None else held if isinstance(held, Packed) else held.packed).shape)


def _unpacked(module: nn.Module, name: str) -> Part | Tensor:
    staged: Staged | None = module.__dict__.get("staged")
    stack: Tensor | Part = getattr(module, name) if staged is None or name not in staged.places else staged.places[name]
    return stack


def stack_facts(module: nn.Module, name: str) -> tuple[object, ...]:
    """Return the shape and formats of a stack; a streamed block is not entered."""
    held: Packed | Staged | None = module.__dict__.get("stacks", {}).get(name)
    if held is None:
        stack = _unpacked(module, name)
        return tuple(stack.shape), str(stack.dtype)
    packed, parts = (held, held.parts) if isinstance(held, Packed) else (held.packed, held.places)
    types = sorted((part, str(one.dtype)) for part, one in parts.items())
    return packed.kind, tuple(packed.shape), str(packed.dtype), packed.blocks, *types


def hold_packed(module: nn.Module, stacks: Mapping[str, Packed | Staged], store: AdapterStore, module_path: str) -> None:
    """Let a module compute with packed stacks [E, D_out, D_in], which replace its parameters of these names."""
    own = module.__dict__
    for name, held in stacks.items():
        packed = held if isinstance(held, Packed) else held.packed
        parameter = module._parameters.pop(name, None)
        dtype = packed.dtype if parameter is None else parameter.dtype  # values of files may have another type
        own[name] = torch.empty(packed.shape, dtype=dtype, device="meta")  # for code that reads a shape
        if isinstance(held, Staged):
            own["staged"] = held
    own.update(stacks=stacks, module_path=module_path)
    own["forward"] = _Forward(module, store, None)
    store.set_reads_experts()


def cover(module: nn.Module, store: AdapterStore, module_path: str, part: str) -> None:
    """Let a module of experts look at the selected adapters from now on; `uncover` undoes it."""
    own = module.__dict__
    if "adapters" not in own:
        own.update(adapters={}, adapter_store=store, module_path=module_path, part=part)
        own["forward"] = _Forward(module, store, own.get("forward"))


def uncover(module: nn.Module) -> None:
    """Let the module run as before its first adapter."""
    own = module.__dict__
    plain = getattr(own.pop("forward"), "plain", None)
    if plain is not None:
        own["forward"] = plain
    for name in ("adapters", "adapter_store", *(() if "stacks" in own else ("module_path",)), "part", "quant_kind"):
        own.pop(name, None)
