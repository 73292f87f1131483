"""Which device map PEFT makes when it loads an adapter on a base that is partly on the CPU or disk: its arithmetic, by steps.

PEFT throws the base's own map away and asks accelerate for one, from the memory that is free while the base is already
loaded. `balanced_budgets` and `infer_map` compute what accelerate's `get_balanced_memory` and `infer_auto_device_map`
do, on a tree of names and sizes, and keep every step. Source: accelerate 1.13.0 and 1.15.0, utils/modeling.py (the same
rule in both); PEFT 0.19.1 and 0.21.2, peft_model.py, load_adapter. Not covered: accelerators other than CUDA's, a
`max_memory` of the user's, and `fallback_allocation`, which PEFT does not use. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Device = int | str
Number = int | float
ONE_GPU_SHARE = 0.9
LAYER_SHARE = 1.25


@dataclass(frozen=True)
class Node:
    """A module, or a bare tensor of one (class_name ""), with its full path in the wrapped model.

    parameters, buffers: (path, bytes) of its own ones. bytes are as accelerate counts them: numbers of elements times
    the size of the dtype, so that a packed 4-bit weight counts its bytes and its scales count nothing.
    """

    path: str
    class_name: str
    parameters: tuple[tuple[str, Number], ...] = ()
    buffers: tuple[tuple[str, Number], ...] = ()
    children: tuple[Node, ...] = ()

    @property
    def is_module(self) -> bool:
        return bool(self.class_name)


@dataclass(frozen=True)
class Step:
    """One decision: what was treated, how large it and what is tied to it are, what room there was, what was done.

    room_bytes: what is left on the device once the largest layer that remains is set aside; None on disk.
    """

    device: Device
    path: str
    size_bytes: Number
    room_bytes: Number | None
    action: Literal["put", "split", "next device"]


@dataclass(frozen=True)
class Inferred:
    """The map and how it came about.

    required: device -> the bytes that accelerate's log line calls "required" for a device that took nothing: the first
    thing it tried there plus the largest layer. largest: (path, bytes) of the layer set aside at the start.
    """

    device_map: dict[str, Device]
    required: dict[Device, Number]
    steps: tuple[Step, ...]
    total_bytes: Number
    largest: tuple[str, Number]


def walk(node: Node) -> Iterator[Node]:
    """Yield a module and every module below it, parents first."""
    yield node
    for child in node.children:
        yield from walk(child)


def sizes_of(root: Node, ties: Iterable[Sequence[str]] = ()) -> dict[str, Number]:
    """Return path -> bytes of every module and tensor that holds any; of tied parameters the first alone counts."""
    copies = {name for group in _in_order(root, ties) for name in group[1:]}
    sizes: dict[str, Number] = {"": 0}
    # Parameters of the whole model come first, then its buffers: leaves are looked for in that order.
    for kind in ("parameters", "buffers"):
        for node in walk(root):
            for path, nbytes in getattr(node, kind):
                if path in copies:
                    continue
                pieces = path.split(".")
                for end in range(len(pieces) + 1):
                    above = ".".join(pieces[:end])
                    sizes[above] = sizes.get(above, 0) + nbytes
    return sizes


def _in_order(root: Node, ties: Iterable[Sequence[str]]) -> list[list[str]]:
    order = {path: place for place, path in enumerate(p for node in walk(root) for p, _ in node.parameters)}
    return [sorted((name for name in group if name in order), key=order.__getitem__) for group in ties]


# Budgets --------------------------------------------------------------------------------------------------------------


def balanced_budgets(
    root: Node, free: Mapping[Device, Number], no_split: Iterable[str], ties: Iterable[Sequence[str]] = ()
) -> dict[Device, Number]:
    """Return what accelerate lets each device take of its free memory: 90 % of one GPU, or equal shares of several."""
    budgets = dict(free)
    gpus = sorted(device for device, nbytes in budgets.items() if isinstance(device, int) and nbytes > 0)
    if len(gpus) == 1:
        first = next(device for device in budgets if isinstance(device, int))
        budgets[first] *= ONE_GPU_SHARE
    if len(gpus) > 1:
        sizes = sizes_of(root, ties)
        share = sizes[""] // len(gpus) + int(LAYER_SHARE * max(_block(root, sizes, no_split), _mean_leaf(sizes)))
        for device in gpus[:-1]:
            budgets[device] = min(share, budgets[device])
    return budgets


def _block(root: Node, sizes: Mapping[str, Number], no_split: Iterable[str]) -> Number:
    """Return the largest, over the unsplittable classes, of the first module of each: not the largest such module."""
    classes = {node.path: node.class_name for node in walk(root)}
    first: dict[str, Number] = {}
    for path, nbytes in sizes.items():
        name = classes.get(path, "")
        if path and name in set(no_split):
            first.setdefault(name, nbytes)
    return max(first.values(), default=0)


def _mean_leaf(sizes: Mapping[str, Number]) -> int:
    tensors = set(_leaves(sizes))
    modules = {path: nbytes for path, nbytes in sizes.items() if path not in tensors}
    leaves = _leaves(modules)
    return int(sum(modules[path] for path in leaves) / max(len(leaves), 1))


def _leaves(sizes: Iterable[str]) -> list[str]:
    paths = list(sizes)
    parents = {path.rpartition(".")[0] for path in paths if "." in path}
    return [path for path in paths if path and path not in parents]


# The map --------------------------------------------------------------------------------------------------------------


def infer_map(
    root: Node, budgets: Mapping[Device, Number], no_split: Iterable[str], ties: Sequence[Sequence[str]] = ()
) -> Inferred:
    """Return the map that accelerate infers for a wrapped model within the budgets (device -> bytes, GPUs first)."""
    return _Placing(root, budgets, frozenset(no_split), ties).run()


@dataclass
class _Placing:
    """The walk over the modules: what is still to be treated, and what every device has taken."""

    root: Node
    budgets: Mapping[Device, Number]
    no_split: frozenset[str]
    ties: Sequence[Sequence[str]]
    placed: dict[str, Device] = field(default_factory=dict)
    required: dict[Device, Number] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        gpus = [device for device in self.budgets if device not in ("cpu", "disk")]
        self.devices: list[Device] = [*self.budgets, *(() if "disk" in self.budgets else ("disk",))]
        # Where room is kept to bring one offloaded layer back.
        self.keeping: set[Device] = {gpus[0], "cpu"} if gpus else {"cpu"}
        self.sizes = sizes_of(self.root, self.ties)
        self.waiting: list[Node] = [*_tensors(self.root), *self.root.children]
        self.used: dict[Device, Number] = dict.fromkeys(self.devices, 0)
        self.at = 0
        self._measure()
        self.first_largest = (self.largest_paths[0] if self.largest_paths else "", self.largest_bytes)

    def run(self) -> Inferred:
        while self.waiting:
            self._treat(self.waiting.pop(0))
        return Inferred(
            cleaned(self.placed), self.required, tuple(self.steps), self.sizes[""], self.first_largest
        )  # fmt: skip

    def _measure(self) -> None:
        """Find the largest layer among what waits: a module without children, or one that is not split."""
        self.largest_bytes: Number = 0
        self.largest_paths: list[str] = []
        pending = [node for node in self.waiting if node.is_module]
        while pending:
            node = pending.pop(0)
            if node.children and node.class_name not in self.no_split:
                pending = [*node.children, *pending]
                continue
            size = self.sizes.get(node.path, 0)
            if size > self.largest_bytes:
                self.largest_bytes, self.largest_paths = size, [node.path]
            elif size == self.largest_bytes:
                self.largest_paths.append(node.path)

    def _treat(self, node: Node) -> None:
        own = node.path + "."
        self.largest_paths = [path for path in self.largest_paths if path != node.path and not path.startswith(own)]
        if not self.largest_paths:
            self._measure()
        device, size = self.devices[self.at], self.sizes.get(node.path, 0)
        kept = self.largest_bytes if device in self.keeping else 0
        room = None if device == "disk" else self.budgets[device] - kept - self.used[device]
        tied = self._tied(node)
        whole = size + sum(self.sizes.get(other.path, 0) - self.sizes.get(name, 0) for name, other in tied)
        if room is None or whole <= room:
            self._put(node, [other for _, other in tied], device, whole, room)
        elif tied and size <= room and self._split_partner(node, tied, device, whole, room):
            return
        elif size >= room and node.children and node.class_name not in self.no_split:
            self._note(device, node, whole, room, "split")
            self.waiting = [*_parameters(node), *node.children, *self.waiting]
            self._measure()
        else:
            self._next_device(node, device, whole, room, kept)

    def _tied(self, node: Node) -> list[tuple[str, Node]]:
        """Return (parameter, waiting module that holds it) of what is tied to a parameter inside and lies outside."""
        own = node.path + "."
        outside: list[str] = []
        for group in self.ties:
            inside = [name for name in group if (name + ".").startswith(own)]
            if inside and len(inside) < len(group):
                outside += sorted(set(group) - set(inside))
        found = []
        for name in outside:
            holder = next((other for other in self.waiting if name.startswith(other.path + ".")), None)
            if holder is not None:
                found.append((name, holder))
        return found

    def _put(self, node: Node, tied: list[Node], device: Device, whole: Number, room: Number | None) -> None:
        self._note(device, node, whole, room, "put")
        self.used[device] += whole
        for other in (node, *tied):
            self.placed[other.path] = device
        self.waiting = [other for other in self.waiting if other not in tied]

    def _split_partner(
        self, node: Node, tied: list[tuple[str, Node]], device: Device, whole: Number, room: Number
    ) -> bool:
        for _, other in tied:
            if other.children and other.class_name not in self.no_split:
                self._note(device, other, whole, room, "split")
                place = self.waiting.index(other)
                self.waiting[place : place + 1] = [*_parameters(other), *other.children]
                self.waiting.insert(0, node)
                self._measure()
                return True
        return False

    def _next_device(self, node: Node, device: Device, whole: Number, room: Number, kept: Number) -> None:
        self._note(device, node, whole, room, "next device")
        if self.used[device] == 0:
            self.required[device] = whole + kept
        self.used[device] += kept
        self.at += 1
        self.waiting.insert(0, node)

    def _note(
        self, device: Device, node: Node, size: Number, room: Number | None,
        action: Literal["put", "split", "next device"],
    ) -> None:  # fmt: skip
        self.steps.append(Step(device, node.path, size, room, action))


def _parameters(node: Node) -> list[Node]:
    return [Node(path, "", ((path, nbytes),)) for path, nbytes in node.parameters]


def _tensors(node: Node) -> list[Node]:
    return [*_parameters(node), *(Node(path, "", (), ((path, nbytes),)) for path, nbytes in node.buffers)]


def cleaned(placed: Mapping[str, Device]) -> dict[str, Device]:
    """Return the map with modules that lie on one device as a whole named once."""
    result: dict[str, Device] = {}

    def gather(prefix: str, inside: dict[str, Device]) -> None:
        if len(inside) > 1 and len(set(inside.values())) == 1:
            result[prefix] = next(iter(inside.values()))
            return
        depth = prefix.count(".") + 1 if prefix else 0
        groups: dict[str, dict[str, Device]] = {}
        for path, device in inside.items():
            if path == prefix:
                result[path] = device
                continue
            groups.setdefault(".".join(path.split(".")[: depth + 1]), {})[path] = device
        for name, found in groups.items():
            gather(name, found)

    gather("", dict(placed))
    return result
