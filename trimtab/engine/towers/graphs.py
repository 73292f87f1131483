"""How do the layers of vision and audio towers run as CUDA graphs, and how does audio of many lengths get few shapes?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.kernels.dequantize import PromptKernels, is_read
from trimtab.engine.layers.leaves import HostLeaf, Leaf
from trimtab.engine.lora.fewer_ops import ShortOps
from trimtab.engine.lora.store import TOWERS, Place, covered
from trimtab.engine.memory.graph_cache import Body, GraphCache, Inputs, Key, Policy
from trimtab.engine.towers.pieces import TowerPieces, UnknownFormError, filled, form_of
from trimtab.errors import gib
from trimtab.planning.memory.towers import BUFFERS, SHAPES
from trimtab.planning.values.execution import CAPTURED

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.layers.context import EngineContext


class TowerOps:
    """The operations of the passes of one model's towers. kernels, short: as chosen for its prompts."""

    def __init__(self, model: EngineContext, kernels: PromptKernels, short: ShortOps) -> None:
        self._kernels, self._short = kernels, short
        self.leaves = four_bit_towers(model)
        # No layer's input is kept in float32 for the next layer, whose graph must not read another graph's tensors.
        self.adapters = kernels.adapters(shares_inputs=False)
        kernels.reserve(self.leaves)

    def running(self) -> AbstractContextManager[None]:
        """Let the towers use the kernels while the block runs."""
        return self._short.step(self.adapters, MatmulTable(self._kernels.matmul(self.leaves)))


def four_bit_towers(model: EngineContext) -> list[Leaf]:
    """Return the layers over 4-bit weights of a model's towers and connectors that its device computes, streamed ones included."""
    paths = {row.module_path for row in model.anatomy.rows if row.part in TOWERS}
    return [
        one for one in model.hf_model.modules()
        if isinstance(one, Leaf) and not isinstance(one, HostLeaf) and is_read(one)
        and one.module_path in paths
    ]  # fmt: skip


_LAYERED = ("vision", "audio")
# Frames of 10 ms that audio is padded to: 1.3 to 30.7 s, each at most half more than the one before.
SOUND_FRAMES = (128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072)
# Families whose audio tower masks padding before operations that look beyond their own position (transformers 5.23.0, gemma4), and
# how often it halves the frames. Gemma 3n's convolutions mask nothing: they make other values of padding than of the audio's end.
PADDED_SOUNDS = {"gemma4": 2}
# Layers that one pass captures while rows are being answered: a few milliseconds each.
LAYERS_AT_ONCE = 4
# Shapes that are kept, each of one tower: a model may have two. A frequent one keeps its graphs while this many others
# come at most.
MOST_SHAPES = 2 * SHAPES
MOST_CREDIT = 8
MOST_MET = 256

FallBack = Callable[[str, str], None]


class _Buffers:
    """The tensors that graphs of one form of arguments read, and those that they write."""

    def __init__(self, form: Hashable, like: Sequence[Tensor]) -> None:
        self.form = form
        self.inputs = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in like]
        self._sources: list[tuple[Tensor, int] | None] = [None] * len(like)
        self.outputs: dict[Hashable, list[Tensor]] = {}

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy a layer's inputs. Inputs that the previous layer also had are already there."""
        for place, (target, source) in enumerate(zip(self.inputs, tensors, strict=True)):
            source_state = self._sources[place]
            if source_state is None or source_state[0] is not source or source_state[1] != source._version:
                target.copy_(source)
                self._sources[place] = (source, source._version)

    def forget(self) -> None:
        """Let the next pass copy everything, and release all tensors of this one."""
        self._sources = [None] * len(self.inputs)

    def arguments(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return a layer's arguments, made of the buffers."""
        args, kwargs = filled(self.form, iter(self.inputs))
        return args, kwargs

    def outputs_like(self, form: Hashable, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the buffers for an output, made on first use."""
        if form not in self.outputs:
            self.outputs[form] = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in like]
        return self.outputs[form]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self.inputs, *(t for several in self.outputs.values() for t in several)))


class Towers:
    """The captured layers of one model's towers. mode: "auto", captured where the plan says so; "static": through the same buffers,
    never captured, on any device; "eager": as they are. There is one graph for each layer and shape, captured on its second use; a
    layer returns a copy. Not covered: layers on the CPU or copied in for every pass, and towers of unknown families
    (bounds_check.py). Reasons: docs/decisions/0019."""

    def __init__(self, model: EngineContext, mode: str, fall_back: FallBack) -> None:
        self.model, self.device, self._fall_back = model, model.device, fall_back
        planned = model.plan.execution.towers
        self.captures = mode == "auto" and planned is not None and planned.mode in CAPTURED
        self.captures &= model.device.type == "cuda"
        if self.captures and model.anatomy.unknown_towers:
            self.captures = False
            fall_back("the look-ups of an unknown tower are checked on the host", "captured towers")
        self.is_on = self.captures or mode == "static"
        self.all_layers = layers_of(model)
        self.layers = [layer for layer, tier in self.all_layers.items() if tier == "resident"] if self.is_on else []
        self.may_cut = not model.anatomy.unknown_towers
        self.replayed = 0
        self.most_bytes = planned.bytes.get(BUFFERS, 0) if self.captures and planned is not None else 2**62
        self._graphs = GraphCache()
        self._shapes: OrderedDict[Hashable, int] = OrderedDict()  # form and adapter of captured layers: recent uses
        self._buffers: dict[Hashable, _Buffers] = {}
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        self._lengths: list[tuple[Tensor, tuple[int, ...]]] = []
        self._key: Hashable = None
        self._serial: int | None = None
        self._left: int | None = None
        # Shapes that are not captured in this pass, and those that it has used.
        self._refused: set[Hashable] = set()
        self._counted: set[Hashable] = set()

    @property
    def captured(self) -> int:
        """How many layers were captured."""
        return self._graphs.captures

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffers on the device."""
        return sum(one.nbytes for one in self._buffers.values())

    @contextmanager
    def running(
        self, key: Hashable, serial: int | None, *, is_busy: bool = False, pieces: TowerPieces | None = None
    ) -> Iterator[None]:  # fmt: skip
        """Let the towers run captured while the block runs.

        key: the adapter's part of a graph's key; serial: of the adapter whose own addresses it reads. is_busy: whether rows are
        being decoded, so that little may be captured. pieces: of a pass that is cut. Errors: PausedError at the end of a piece.
        """
        if not self.is_on and pieces is None:
            yield
            return
        self._key, self._serial, self._left = key, serial, LAYERS_AT_ONCE if is_busy else None
        self._refused.clear()
        self._counted.clear()
        self._drop_adapters()
        try:
            layers: dict[Place, object] = {layer: self._forward_of(layer, pieces) for layer in self.all_layers}
            with covered(layers | (padded_sounds(self.model.hf_model) if self.is_on else {})):
                yield
        finally:
            self._lengths.clear()
            for buffers in self._buffers.values():
                buffers.forget()

    def forget(self, key: Hashable) -> None:
        """Drop the graphs that read an adapter's layout."""
        for shape in [shape for shape in self._shapes if shape[1] == key]:  # type: ignore[index]
            self._drop(shape)

    def _drop_adapters(self) -> None:
        """Drop graphs of adapters that are gone."""
        serials = {None, *self.model.adapter_store.serials.values()}
        dropped = {key[1:] for key, one in self._graphs.items() if one.serial not in serials}
        for shape in dropped:
            self._drop(shape)

    # One layer --------------------------------------------------------------------------------------------------------

    def _forward_of(self, layer: nn.Module, pieces: TowerPieces | None) -> Callable[..., object]:
        compute: Callable[..., object] = layer.forward
        if self.is_on and self.all_layers[layer] == "resident":
            compute = partial(self._run, layer, compute)
        if pieces is None:
            return compute

        def forward(*args: object, **kwargs: object) -> object:
            return pieces.run(compute, args, kwargs)

        return forward

    def _run(self, layer: nn.Module, inner: Callable[..., object], *args: object, **kwargs: object) -> object:
        tensors: list[Tensor] = []
        try:
            form = form_of((args, kwargs), tensors, self._values)
        except UnknownFormError as exc:
            self._fall_back(f"{type(layer).__name__} is given {exc}", "captured towers")
            return inner(*args, **kwargs)
        shape, key = (form, self._key), (layer, form, self._key)
        captured = self._graphs.get(key)
        if captured is None:
            if not self._may_capture(shape, tensors):
                return inner(*args, **kwargs)
            return self._capture(layer, inner, shape, tensors)
        self._used(shape)
        self.replayed += 1
        return self._by_graph(key, inner, self._buffers[form], captured.kept, captured.outputs, tensors)

    def _used(self, shape: Hashable) -> None:
        """Count a pass of a shape, once."""
        if shape not in self._counted:
            self._counted.add(shape)
            self._shapes[shape] = min(self._shapes[shape] + 1, MOST_CREDIT)
            self._shapes.move_to_end(shape)

    def stop_cutting(self) -> None:
        """Compute passes in one piece from now on."""
        self.may_cut = False

    def _values(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the values of a tensor of lengths, read once in a pass."""
        for known, values in self._lengths:
            if known is tensor:
                return values
        values = tuple(tensor.tolist())
        self._lengths.append((tensor, values))
        return values

    def _may_capture(self, shape: tuple[Hashable, Hashable], tensors: Sequence[Tensor]) -> bool:
        """Whether a layer of this shape is captured now: from the second pass of the shape on, where there is room."""
        if shape in self._refused or self._left == 0 or (not self.captures and self.device.type == "cuda"):
            return False
        if shape in self._shapes:
            return True
        if shape in self._met and self._has_room(shape, tensors):
            self._shapes[shape] = 1
            return True
        self._refused.add(shape)
        self._met[shape] = None
        self._met.move_to_end(shape)
        while len(self._met) > MOST_MET:
            self._met.popitem(last=False)
        return False

    def _has_room(self, shape: tuple[Hashable, Hashable], tensors: Sequence[Tensor]) -> bool:
        """Make room for one more shape. False if the existing ones are used more often, or if it is larger than planned."""
        # The output of a layer is about as large as its first input tensor.
        needed = 0 if shape[0] in self._buffers else sum(one.nbytes for one in (*tensors, *tensors[:1]))
        if needed > self.most_bytes:
            why = f"a pass needs {gib(needed)} of buffers, {gib(self.most_bytes)} are planned"
            self._fall_back(why, "captured towers")
            return False
        while self._shapes and (len(self._shapes) >= MOST_SHAPES or self.buffer_bytes + needed > self.most_bytes):
            oldest = next(iter(self._shapes))
            self._shapes[oldest] -= 1
            if self._shapes[oldest] > 0:
                self._shapes.move_to_end(oldest)
                return False
            self._drop(oldest)
        return True

    def _drop(self, shape: Hashable) -> None:
        credit = self._shapes.pop(shape, None)
        self._graphs.drop(lambda key, _: key[1:] == shape)
        form = shape[0]  # type: ignore[index]
        if credit is not None and all(other[0] != form for other in self._shapes):  # type: ignore[index]
            self._buffers.pop(form, None)

    # Capturing --------------------------------------------------------------------------------------------------------

    def _capture(
        self, layer: nn.Module, inner: Callable[..., object], shape: tuple[Hashable, Hashable], tensors: Sequence[Tensor]
    ) -> object:  # fmt: skip
        """Compute a layer, keep a graph of it with the same result, and return its output."""
        buffers = self._buffers.get(shape[0])
        if buffers is None:
            buffers = self._buffers[shape[0]] = _Buffers(shape[0], tensors)
        buffers.load(tensors)
        args, kwargs = buffers.arguments()
        expected = inner(*args, **kwargs)
        parts: list[Tensor] = []
        try:
            form = form_of(expected, parts, self._values)
        except UnknownFormError as exc:
            self._fall_back(f"{type(layer).__name__} returns {exc}", "captured towers")
            return expected
        outputs = buffers.outputs_like(form, parts)
        for target, source in zip(outputs, parts, strict=True):
            target.copy_(source)
        buffers.forget()  # where a layer has written into its inputs
        kept = [one.clone() for one in outputs]
        result = self._by_graph((layer, *shape), inner, buffers, form, outputs, tensors, kept)
        if result is None:
            return expected
        self._left = None if self._left is None else self._left - 1
        return result

    def _by_graph(
        self, key: Key, inner: Callable[..., object], buffers: _Buffers, form: Hashable, outputs: Sequence[Tensor],
        tensors: Sequence[Tensor], expected: Sequence[Tensor] = (),
    ) -> object:  # fmt: skip
        """Return a layer's result by its graph, captured if there is none; None if it is not. form, outputs, expected: of the
        result, and its values."""

        def run() -> list[Tensor]:
            args, kwargs = buffers.arguments()
            parts: list[Tensor] = []
            form_of(inner(*args, **kwargs), parts, self._values)
            return parts

        body = Body(run, lambda: expected, lambda _: outputs, self._serial, lambda: form)
        policy = Policy(self.model, "a tower", self._end_captures, self._forget_all, is_static=not self.captures)
        if self._graphs.run(key, body, Inputs(partial(buffers.load, tensors)), policy) is None:
            return None
        return filled(form, iter([one.clone() for one in outputs]))

    def _forget_all(self) -> None:
        for kept in (self._graphs, self._shapes, self._buffers):
            kept.clear()

    def _end_captures(self, why: str) -> None:
        self.captures = False
        self._fall_back(why, "captured towers")


def layers_of(model: EngineContext) -> dict[nn.Module, str]:
    """Return the layers of a model's towers, each with the tier of its weights."""
    tiers, paths = model.plan.tiers(), {}
    for row in model.anatomy.rows:
        if row.part in _LAYERED and row.block.rpartition(".")[2].isdecimal():
            paths[row.block] = tiers.get(row.block, "resident")
    return {model.hf_model.get_submodule(path): tier for path, tier in paths.items()}


# Audio ---------------------------------------------------------------------------------------------------------------


def padded_frames(frames: int) -> int:
    """Return the number of frames that audio is padded to: its own number beyond the largest."""
    return next((size for size in SOUND_FRAMES if size >= frames), frames)


def padded_sounds(hf_model: HFModel) -> dict[Place, object]:
    """Return what gives the audio tower a few lengths of audio (`covered`), in families where padding changes nothing."""
    owner, halvings = getattr(hf_model, "model", None), PADDED_SOUNDS.get(hf_model.config.model_type)
    if halvings is None or owner is None or not hasattr(owner, "get_audio_features"):
        return {}
    inner = owner.get_audio_features

    def features(input_features: Tensor, input_features_mask: Tensor, *args: object, **kwargs: object) -> object:
        frames = input_features.shape[1]
        more = padded_frames(frames) - frames
        if not more:
            return inner(input_features, input_features_mask, *args, **kwargs)
        output = inner(
            nn.functional.pad(input_features, (0, 0, 0, more)), nn.functional.pad(input_features_mask, (0, more)),
            *args, **kwargs,
        )  # fmt: skip
        tokens = frames
        for _ in range(halvings):
            tokens = (tokens + 1) // 2
        return _shortened(output, tokens)

    return {(owner, "get_audio_features"): features}


def _shortened(output: ModelOutput, tokens: int) -> ModelOutput:
    """Return a tower's output without the padding after the audio."""
    parts: Mapping[str, object] = dict(output.items())
    shorter = {name: value[:, :tokens] if isinstance(value, Tensor) else value for name, value in parts.items()}
    return type(output)(**shorter)
