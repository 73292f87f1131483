"""What is a loaded model: the object that owns the memory, answers prompts, and loads and unloads adapters?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.checkpoint.folder import find_folder, unapplied_rules
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import near_names
from trimtab.engine import float16_check
from trimtab.engine.batch import generate as generation
from trimtab.engine.batch import kept_batch
from trimtab.engine.batch.kept_batch import KeptBatch, Turns
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.media import several
from trimtab.engine.cuda.nvrtc import wait_for_all
from trimtab.engine.decode.step_choice import Fallback
from trimtab.engine.kv.sequence import Inputs, lost_words
from trimtab.engine.layers.leaves import UnpackedWeights, keep_unpacked
from trimtab.engine.loader import transformers_model
from trimtab.engine.loader.load import Loaded, Progress, fill
from trimtab.engine.loader.processor import load_processor
from trimtab.engine.lora import layers, mixes
from trimtab.engine.lora.base_values import BaseValues, base_values
from trimtab.engine.lora.store import ADAPTER_DTYPE, TOWERS, AdapterStore, AttachedAdapter, Fitting, HeldAdapter
from trimtab.engine.memory import reserve
from trimtab.engine.memory.out_of_memory import naming_out_of_memory
from trimtab.engine.memory.rates import bound_stacks, bound_workspaces
from trimtab.engine.memory.shared_pool import PrefillMemoryPool, room_of
from trimtab.engine.model_calls import Asking, match_planned, read_held, read_planned
from trimtab.engine.passes import attention
from trimtab.engine.prefill import prefix_cache
from trimtab.engine.towers.bounds_check import guard_towers
from trimtab.errors import AdapterError, CheckpointError, DoesNotFitError, RequestError, TrimtabError, gib
from trimtab.planning import Plan
from trimtab.planning.memory.adapters import copies_bytes, first_adapter_bytes
from trimtab.planning.plan.contents import FilesRead
from trimtab.planning.values.byte_sizes import check_answers, was_chosen
from trimtab.planning.values.execution import CAPTURED
from trimtab.process import phases
from trimtab.request import DECODE_MODES, GenerateRequest, check_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.calls.asked_model import Chosen
    from trimtab.engine.chat.control_tokens import ControlTokens
    from trimtab.engine.formats.hf_types import HFModel, Processor
    from trimtab.engine.memory_shares import Share
    from trimtab.engine.prefill.prefix_cache import PrefixCache
    from trimtab.engine.tiers.streaming import Streamer
    from trimtab.planning.values.rows import Unquantized
    from trimtab.request import QuestionOptions


class LoadedModel(Asking):
    """A model in the tiers of its plan. Use it as a context manager; `close` frees all memory.

    plan, device, dtype, context_tokens: as planned. hf_model: transformers' module tree with trimtab's layers in place. decode: how
    steps run: "auto" is the fastest mode that works here; "eager" is transformers' own generation, one kernel after the other;
    "graph" its modules as CUDA graphs; "fused" trimtab's kernels as CUDA graphs. progress: called with (bytes read, total bytes).
    files: what planning read. held: gets the plan's adapters in host memory by name. reads_text: read the tokenizer before the
    weights. Errors: CheckpointError and AdapterError for changed files; DeviceError if memory runs out. One answer at a time: calls
    of other threads wait for their turn; a second one of the same thread while its first is unfinished is refused.
    """

    def __init__(
        self, plan: Plan, *, progress: Progress | None = None, files: FilesRead[transformers_model.Probe] | None = None,
        decode: str | None = None, held: dict[str, HeldAdapter] | None = None, reads_text: bool = False,
    ) -> None:  # fmt: skip
        decode = plan.request.decode if decode is None else decode
        check_choice(decode, DECODE_MODES, field_name="decode")
        self.plan, self.decode = plan, decode
        self.device = torch.device(plan.execution_device)
        self.dtype: torch.dtype = getattr(torch, plan.request.dtype)
        self.context_tokens = plan.request.context_tokens
        self.adapter_store = AdapterStore()
        # The modules for each adapter in host memory, as long as it is referenced.
        self._fittings: WeakKeyDictionary[HeldAdapter, Fitting] = WeakKeyDictionary()
        self._base_values: WeakKeyDictionary[HeldAdapter, BaseValues] = WeakKeyDictionary()
        self.turns = Turns()
        # Held while an adapter is exchanged, when its name is attached to nothing for a moment.
        self.exchanging = threading.RLock()
        self.preparing = threading.Lock()
        self.kept = KeptBatch()
        self.prefix_cache: PrefixCache | None = None
        self.prompt_room: PrefillMemoryPool | None = None
        # For the kernels of steps and chunks; on a CPU each layer has its own share of them instead.
        self.unpacked: UnpackedWeights | None = None
        self.unpacked_bytes = 0
        self._no_processor: dict[str, object] | None = None
        self._loaded: Loaded | None = None
        self._give_back_attention: Callable[[], object] = lambda: None
        self._baseline_bytes = 0
        if self.device.type == "cuda":
            bound_workspaces(plan.gpu_budget_bytes)
            bound_stacks(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._baseline_bytes = torch.cuda.memory_allocated(self.device)
        with ExitStack() as undo:
            undo.callback(self.close)
            if attention.is_left_out(plan):
                self._give_back_attention = attention.of_this_process().leave_out(self)
            self._attention_at_load = attention.why_without(plan, self.device)
            if reads_text:
                _ = self.processor
            with self._out_of_memory_named("loading"):
                self._loaded, self.anatomy = fill(plan, self.adapter_store, progress=progress, files=files)
                if self.anatomy.unknown_towers:
                    guard_towers(self.hf_model)
                phases.begin("unpacking weights")
                self.unpacked, self.unpacked_bytes = keep_unpacked(self)
                rules = unapplied_rules(getattr(getattr(self._loaded.hf_model, "generation_config", None), "to_dict", dict)())
                self._loaded.left_out |= kept_batch.compared(self) | rules
                if plan.request.prefix_cache_bytes:
                    self.keep_prefixes(plan.request.prefix_cache_bytes)
                phases.begin("attaching adapters")
                for name, adapter in read_planned(self, files, held):
                    self._attach_planned(name, adapter)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # memory of packing becomes available to others
            if self.dtype == torch.float16 and was_chosen(plan.dtype_reason) and self.anatomy.answers_unsupported is None:
                with self._out_of_memory_named("measuring activations"):
                    float16_check.check(self)
            if self.device.type == "cuda":
                self.prompt_room = room_of(plan, self.anatomy, self.device)
                self._prepare_steps()
                if plan.request.batch == 1:  # the batch's owner prepares several rows
                    reserve.take(plan, self.device)
            undo.pop_all()

    @cached_property
    def mixes(self) -> mixes.Mixes:
        """The attached sums of adapters."""
        return mixes.Mixes(self)

    def _attach_planned(self, name: str, held: HeldAdapter) -> None:
        """Attach an adapter of the plan. Errors: AdapterError if its files are no longer the ones that were planned."""
        planned, now = self.plan.adapter_stamps.get(name), held.spec.file.stamps
        if planned is not None and tuple(planned) != tuple(now):
            changed = sorted({file for file, *_ in set(planned) ^ set(now)})
            raise AdapterError(
                self.plan.request.adapters[name], [f"{file} changed since the plan was made" for file in changed],
                hint="Make the plan again",
            )  # fmt: skip
        self._attach(name, held)

    def lend_prompt_room(self) -> None:
        """Give back the memory of captured prompts where a pass of another kind needs it (`PrefillMemoryPool.lend`)."""
        if self.prompt_room is not None:
            self.prompt_room.lend(self.free_adapter_bytes())

    def forget_batch(self) -> None:
        """Give back the batch that the last answers used, for a caller that makes its own: the plan counts one of them."""
        self.kept.forget(self)

    def _prepare_steps(self) -> None:
        """Capture the planned steps now: failed captures on this card are known when the model is loaded."""
        step = self.plan.execution.step
        if step.mode not in CAPTURED or self.decode == "eager" or self.plan.request.batch > 1:
            return  # the batch's owner prepares several rows
        if self.context_tokens < 2:
            return  # a prompt of one token leaves no room for a step
        phases.begin("capturing steps")
        with self._out_of_memory_named("capturing decode steps"):
            batch = self.rows()
            if batch is not None:
                batch.prepare()

    @property
    def is_open(self) -> bool:
        """Whether the model has not been closed."""
        return self._loaded is not None

    @property
    def hf_model(self) -> HFModel:
        """transformers' module tree, with trimtab's layers in place of Linears. Errors: RequestError once the model is closed."""
        if self._loaded is None or self._loaded.hf_model is None:
            raise RequestError("the model is closed", field="model")
        return self._loaded.hf_model

    @property
    def streamer(self) -> Streamer | None:
        """The object that copies streamed blocks, None if there are none or the model is closed."""
        return None if self._loaded is None else self._loaded.streamer

    @cached_property
    def processor_folder(self) -> Path:
        """The checkpoint folder with the tokenizer and processor files."""
        return find_folder(self.plan.request.model)

    @property
    def prefill_tokens(self) -> int:
        """The chunk length in which a text prompt is computed, in tokens, as planned."""
        return self.plan.prefill_tokens

    @cached_property
    def processor(self) -> Processor:
        """The checkpoint's processor or tokenizer. Errors: CheckpointError, also for another model's tokenizer."""
        if self._no_processor is not None:  # every answer asks, and reading such a folder takes milliseconds
            raise TrimtabError.from_dict(self._no_processor)  # one error would keep the frames of all answers, and their inputs
        try:
            return load_processor(self.processor_folder)
        except CheckpointError as exc:
            self._no_processor = exc.to_dict()
            raise

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that text of a chat must not become (`control_tokens.ControlTokens`)."""
        return chat.control_tokens(self.processor)

    @property
    def _attached(self) -> dict[str, AttachedAdapter]:
        return {name: one.about for name, one in list(self.adapter_store.holders.items()) if one.about is not None}

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return tuple(name for name, one in self._attached.items() if one.spec is not None)

    def adapter_spec(self, name: str) -> AdapterSpec:
        """Return the description of a loaded adapter: its targets and files. Errors: RequestError if no adapter has this name."""
        one = self._attached.get(name)
        if one is None or one.spec is None:
            raise RequestError(
                "no adapter of this name is loaded", field="adapter", value=name,
                allowed=self.adapters, near=near_names(str(name), self.adapters),
            )  # fmt: skip
        return one.spec

    @property
    def unquantized(self) -> tuple[Unquantized, ...]:
        """The weights that stay in full precision although quantization was requested, with reasons."""
        return tuple(self.plan.unquantized)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory on every device, and the disk tier's file. A second call does nothing."""
        if self.device.type == "cuda":
            wait_for_all(self.device)  # steps that were queued ahead read host memory that is given back here
        self._give_back_attention()
        loaded, self._loaded = self._loaded, None
        if self.prompt_room is not None:
            self.prompt_room.release()
        self.kept.drop()
        self.unpacked, self.unpacked_bytes, self.prompt_room = None, 0, None
        if loaded is not None:
            loaded.close()
        self._fittings.clear()
        self._base_values.clear()
        if self.prefix_cache is not None:
            self.prefix_cache.close()
            self.prefix_cache = None
        self.adapter_store.holders.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Adapters ---------------------------------------------------------------------------------------------------------

    def read_adapter(self, path: str | Path, *, name: str | None = None) -> HeldAdapter:
        """Return the adapter of a folder in host memory, matched with this model. path: the folder. name: for the log
        (None: its folder).

        Errors: AdapterError, CheckpointError.
        """
        held = read_held(self, match_planned(self, path, log_name=str(path) if name is None else name))
        self.fitting(held)  # now, not while rows wait
        return held

    def fitting(self, held: HeldAdapter) -> Fitting:
        """Return the modules that an adapter changes on this model. Cached. Errors: AdapterError if it fits another model."""
        fitting = self._fittings.get(held)
        if fitting is None:
            fitting = self._fittings[held] = layers.fit(self.hf_model, held.spec, held.starts())
        return fitting

    def adapter_pieces(self, held: HeldAdapter) -> Iterator[None]:
        """Compute the values of the model's weights that attaching an adapter needs; yields after each piece, between two steps.

        Without it, `load_adapter` does the same at once. Errors: AdapterError if it fits another model, DeviceError.
        """
        fitting, device = self.fitting(held), self.device
        if not fitting.rest:
            self._base_values.setdefault(held, BaseValues({}, frozenset()))
            return
        pieces = base_values(
            self.hf_model, fitting.rest, read=lambda entry: held.tensors[entry.file, entry.start], device=device,
            dtype=getattr(torch, ADAPTER_DTYPE),
        )  # fmt: skip
        while held not in self._base_values:
            with torch.no_grad(), self._out_of_memory_named("preparing an adapter"):
                try:
                    next(pieces)
                except StopIteration as end:
                    self._base_values[held] = end.value
                    return
            yield

    @cached_property
    def _first_adapter_bytes(self) -> int:
        return first_adapter_bytes(self.plan, self.anatomy)

    def free_adapter_bytes(self) -> int:
        """Return how many more bytes of adapters the plan has memory for on the execution device.

        Scratch memory of adapters is subtracted where the plan was made without adapters.
        """
        counted = self.plan.gpu.get("adapters", 0) - self._first_adapter_bytes
        free_bytes = self.plan.gpu_budget_bytes - self.plan.gpu_needed_bytes + counted
        sizes = self.adapter_sizes.values()
        return free_bytes - sum(sizes) - self._copies_beyond(sizes)

    @property
    def adapter_sizes(self) -> Mapping[str, int]:
        """Bytes that each adapter and mix on the model takes of the memory for adapters, by name."""
        return {name: one.nbytes for name, one in self._attached.items()}

    def adapter_bytes(self, adapter: HeldAdapter | AdapterSpec) -> int:
        """Return the bytes of `free_adapter_bytes` that one more adapter takes, with its copy for captured prompts."""
        return self.bytes_with_copies((adapter.spec if isinstance(adapter, HeldAdapter) else adapter).nbytes(ADAPTER_DTYPE))

    def bytes_with_copies(self, own: int) -> int:
        """Return the share of `free_adapter_bytes` that an adapter of this many bytes takes, as `adapter_bytes`."""
        loaded = list(self.adapter_sizes.values())
        return own + self._copies_beyond([*loaded, own]) - self._copies_beyond(loaded)

    def _copies_beyond(self, sizes: Iterable[int]) -> int:
        counted = self.plan.execution.prompt.bytes.get("adapter_copy")
        return 0 if counted is None else max(copies_bytes(sizes) - counted, 0)

    def load_adapter(self, name: str, adapter: str | Path | HeldAdapter) -> None:
        """Load one more adapter, from its folder or from host memory.

        name: its name from now on. adapter: a folder that PEFT wrote, or an adapter of `read_adapter`.
        Errors: RequestError if the name is in use; AdapterError with every mismatch; CheckpointError; DoesNotFitError if
        the plan leaves too few bytes.
        """
        if name in self.adapters:
            raise RequestError("an adapter of this name is loaded", field="adapter", value=name)
        spec = (
            adapter.spec
            if isinstance(adapter, HeldAdapter)
            else match_adapter(read_adapter(str(adapter), values=False), self.anatomy)
        )
        free, needed = self.free_adapter_bytes(), self.adapter_bytes(spec)
        if needed > free:
            with self.turns.hold("load_adapter"):
                self.mixes.clear()
            free = self.free_adapter_bytes()
        if needed > free:  # asked before a tensor is read
            raise DoesNotFitError(
                f"the plan leaves {gib(max(free, 0))} for another adapter", block=f"adapter {name}",
                device=str(self.device), needed_bytes=needed, budget_bytes=max(free, 0),
                hint="Unload another adapter, or plan with this one (adapters=)",
            )  # fmt: skip
        held = adapter if isinstance(adapter, HeldAdapter) else self.read_adapter(adapter, name=name)
        with self.turns.hold("load_adapter"), self._out_of_memory_named(f"loading adapter {name}"):
            self._attach(name, held)

    def _attach(self, name: str, held: HeldAdapter) -> None:
        fitting = self.fitting(held)
        for _ in self.adapter_pieces(held):
            pass
        # On a GPU a copy, on a CPU the adapter is used in place.
        whole = held.memory.tensor.to(self.device, non_blocking=True)
        held.memory.is_used(self.device)  # the adapter may be dropped before the copy has begun
        piece = None
        if held.dtype is not None:
            piece = whole.view(held.dtype).to(getattr(torch, ADAPTER_DTYPE))

        def read(entry: TensorEntry) -> Tensor:
            key = (entry.file, entry.start)
            return held.places[key].view(whole) if key in held.places else held.tensors[key]

        content = "" if self.prefix_cache is None else held.content
        layers.attach_fitted(
            fitting, name, read=read, device=self.device, store=self.adapter_store, dtype=ADAPTER_DTYPE, piece=piece,
            base=self._base_values[held], about=AttachedAdapter(held.spec, held.device_bytes, content),
        )  # fmt: skip

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter and free its memory. Errors: RequestError if no adapter has this name."""
        self.check_adapter(name)
        with self.turns.hold("unload_adapter"):
            self.mixes.forget(name)
            layers.detach(self.hf_model, name, store=self.adapter_store)

    # Prefix cache -----------------------------------------------------------------------------------------------------

    def keep_prefixes(self, capacity_bytes: int) -> None:
        """Cache keys and values of prompts and answers in host memory, so that a repeated prefix is not computed again.

        capacity_bytes: size of the cache. A model that was planned with `prefix_cache=` has one already. Errors:
        RequestError if there is one, or if the bytes are too few for a prefix; DoesNotFitError if the host budget leaves less.
        """
        if self.prefix_cache is not None:
            raise RequestError("the model already has a prefix cache", field="prefix_cache", value=capacity_bytes)
        self.prefix_cache = prefix_cache.PrefixCache.within(self, capacity_bytes)

    def adapter_content(self, name: str | None) -> str:
        """Return a text that is equal for two loaded adapters only if they compute the same, under any names; "" for none."""
        one = None if name is None else self._attached.get(name)
        known = "" if one is None else one.content
        return "" if name is None else known or f"attached {self.adapter_store.holders[name].serial}"

    def tower_content(self, name: str | None) -> str:
        """Return the same for an adapter's changes of towers and connectors: "" if it changes nothing there."""
        one = None if name is None else self._attached.get(name)
        spec = None if one is None else one.spec  # a sum of adapters has none
        is_beside = spec is not None and not any(target.part in TOWERS for target in spec.targets)
        return "" if is_beside else self.adapter_content(name)

    # Decoding ---------------------------------------------------------------------------------------------------------

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The slower computations that replace a kernel or a graph, with reasons; complete after a first answer. Also the
        rules of the checkpoint's generation_config.json that answers do not follow."""
        own = () if self.kept.batch is None else tuple(self.kept.batch.steps.fallbacks)
        loaded = {} if self._loaded is None else dict(self._loaded.left_out)
        kept = None if self.prefix_cache is None else self.prefix_cache.why_not
        loaded |= {} if kept is None else {"prefix cache": kept}
        # Graphs captured while loading stay as they are when the other model is closed.
        without = attention.why_without(self.plan, self.device) or self._attention_at_load
        loaded |= {} if without is None else {"cuDNN's attention": without}
        return tuple(dict.fromkeys((*(Fallback(what, why) for what, why in loaded.items()), *self.kept.fallbacks, *own)))

    def rows(self) -> Batch | None:
        """Return the batch that `answer` and `generate` decode with, None where transformers' own generation decodes.

        It has one row, or the plan's rows where answers are batch-invariant. Errors: DeviceError if an explicitly requested
        decode mode is unavailable.
        """
        return self.kept.single(self)

    # Answers ----------------------------------------------------------------------------------------------------------

    def prepare(
        self, prompt: object, *, image: object = None, audio: object = None, system: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Inputs:  # fmt: skip
        """Return the model inputs of a prompt.

        prompt: text, chat messages, or a list of token ids. image, audio: one or several. system: a system message.
        template_kwargs: further values for the chat template. Errors: RequestError, CheckpointError.
        """
        with self.preparing:  # a tokenizer is one thread's at a time
            return chat.prepare(
                self, prompt, images=() if image is None else several(image), audios=() if audio is None else several(audio),
                system=system, template_kwargs=dict(template_kwargs or {}),
            )  # fmt: skip

    def generate(self, prompt: object, **options: Unpack[QuestionOptions]) -> Iterator[str]:
        """Yield the answer as it arrives, in whole characters.

        prompt: text, chat messages, or a list of token ids. image: a file, bytes, a Pillow image or a uint8 array [H, W] or
        [H, W, 3 or 4]; one or several. audio: a file, bytes, samples at 16 kHz or (samples, rate) with samples [S] or [S,
        channels] from -1 to 1; one or several. system: a system message. adapter: a name, None for the base, {name: weight}
        for a weighted sum. template_kwargs: further values for the chat template. options: the fields of GenerateRequest.
        Errors: RequestError before any work, DeviceError if memory runs out.
        """
        inputs, request, adapter = self.question(prompt, options)
        # Made here, iterated there: errors of the request are raised before the first piece is requested.
        return generation.texts(generation.Generation(self, inputs, request), self.answering(adapter))

    def answer(self, prompt: object, **options: Unpack[QuestionOptions]) -> generation.Answer:
        """Return the whole answer with its token ids, finish reason and timings (seconds). prompt, options, errors: as in
        `generate`."""
        inputs, request, adapter = self.question(prompt, options)
        return self.answer_inputs(inputs, request, adapter=adapter)

    def answer_inputs(self, inputs: Inputs, request: GenerateRequest, *, adapter: Chosen = None) -> generation.Answer:
        """Return the answer to the inputs of `prepare`. request: sampling and limits. adapter: as in `generate`.

        Errors: RequestError for an unknown adapter, DeviceError if memory runs out.
        """
        self.check_adapter(adapter)
        with self.answering(adapter):
            return generation.generate_text(self, inputs, request)

    def logits(
        self, prompt: object, *, image: object = None, audio: object = None, system: str | None = None,
        adapter: Chosen = None, template_kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return teacher-forced logits of a prompt.

        prompt, image, audio, system, adapter, template_kwargs: as in `generate`.
        Shapes: [S, V] float32 on the CPU. Errors: RequestError, DeviceError.
        """
        check_answers(self.anatomy)
        self.check_adapter(adapter)
        inputs = self.prepare(prompt, image=image, audio=audio, system=system, template_kwargs=template_kwargs)
        with self.answering(adapter):
            return generation.logits(self, inputs)

    @contextmanager
    def answering(self, adapter: Chosen) -> Iterator[None]:
        """Answer with an adapter within: one call at a time. Errors: as `Mixes.name_of`; DeviceError if memory runs out."""
        with self.turns.hold("generate"), self._out_of_memory_named("answering"):
            self.adapter_store.set(self.adapter_name(adapter))
            try:
                yield
            except IndexError as exc:  # of a look-up in transformers' own generation
                if lost_words(self.hf_model):
                    raise RequestError("the answer has a token that a table of the layers has no row for", field="prompt") from exc
                raise
            finally:
                self.adapter_store.set(None)

    @contextmanager
    def _out_of_memory_named(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            with naming_out_of_memory(what, self.plan, self.device):
                raise

    def memory(self) -> dict[str, int]:
        """Return measured bytes by name.

        gpu_bytes, gpu_peak_bytes: tensors on the execution device, now and at peak since loading began. gpu_process_bytes:
        the driver's memory for the process there (context, code, graphs and torch's cache included);
        gpu_process_is_estimate is 1 where the driver does not report it, and the figure then leaves out kernels and graphs.
        host_peak_bytes: peak of the process in host memory. Not measured: gpu_planned_bytes, the plan's figure for the
        process, and gpu_decode_bytes, of captured steps beyond the plan (0 for planned ones). Shares: `memory_shares`.
        """
        from trimtab.engine import memory_shares

        return memory_shares.measured(self, self.kept.batch, since_bytes=self._baseline_bytes)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers on the execution device, measured once."""
        from trimtab.engine import memory_shares

        return memory_shares.weight_bytes(self)

    def memory_shares(self, batch: Batch | None = None) -> tuple[Share, ...]:
        """Return the shares of the device's memory, planned and measured. batch: None is the one of `answer`."""
        from trimtab.engine import memory_shares

        return memory_shares.shares_of(self, batch or self.kept.batch)
