"""Which logits does a model have for given tokens, also with sums in other orders?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.process import phases
from trimtab.verification.routes.alarm_rate import DRAWS
from trimtab.verification.routes.compare import Noise, drawn_noise, noise_between

ONCE, TWICE = "once", "the same again"
# Enough rows and chunks to change the tiling of a matrix product; each also adds runs to compare with each other.
BATCHES = (2, 3)


def read_inputs(file: str | Path, device: torch.device | str) -> dict[str, Tensor]:
    """Return the prepared inputs of one prompt on a device."""
    return {name: tensor.to(device) for name, tensor in load_file(str(file)).items()}


def save_run(file: Path, logits: Tensor, hidden: Sequence[Tensor]) -> None:
    """Write logits [S, V] and hidden states [layers, S, D] (none: omitted) for the process that compares."""
    tensors = {"logits": logits.cpu().contiguous()}
    if hidden and all(layer.shape == hidden[0].shape for layer in hidden):
        tensors["hidden"] = torch.stack([layer.cpu() for layer in hidden])
    save_file(tensors, str(file))


def read_run(file: str | Path) -> tuple[Tensor, Tensor | None]:
    """Return logits [S, V] and hidden states [layers, S, D] or None."""
    tensors = load_file(str(file))
    return tensors["logits"], tensors.get("hidden")


def extended(inputs: Mapping[str, Tensor], continuation: Sequence[int]) -> dict[str, Tensor]:
    """Return one row's inputs with tokens appended: ids, ones in the mask, zeros in every other integer [1, S]."""
    if not continuation:
        return dict(inputs)
    length = inputs["input_ids"].shape[1]
    longer = {}
    for name, tensor in inputs.items():
        if tuple(tensor.shape) != (1, length) or tensor.is_floating_point():
            longer[name] = tensor
            continue
        more = torch.zeros(1, len(continuation), dtype=tensor.dtype, device=tensor.device)
        if name == "input_ids":
            more = torch.tensor([list(continuation)], dtype=tensor.dtype, device=tensor.device)
        elif name == "attention_mask":
            more = torch.ones_like(more)
        longer[name] = torch.cat([tensor, more], dim=1)
    return longer


def wanted(item: Mapping[str, Any], answers: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the tokens whose logits an item needs, None if it answers itself."""
    if item.get("follows") is not None:
        return list(answers[item["follows"]])
    return None if item.get("continuation") is None else list(item["continuation"])


def answer_and_measure(
    items: Sequence[Mapping[str, Any]], request: Mapping[str, Any],
    answer: Callable[[int, Mapping[str, Any], list[int] | None], list[int]],
    measure: Callable[[int, Mapping[str, Any], list[int]], None],
) -> None:  # fmt: skip
    """Answer every item of a route's request, then measure the noise of the first ones, as many as it requests.

    answer: gets place, item and the wanted tokens, and returns the item's continuation. The noise is last: its larger batches must
    not count in the reported memory of the route.
    """
    answers: list[list[int]] = []
    for place, item in enumerate(items):
        phases.begin("prompt", phases.far_text(place + 1, len(items)))
        answers.append(answer(place, item, wanted(item, answers)))
    count = request["noise_items"] if request["noise"] else 0
    for place, (item, continuation) in enumerate(list(zip(items, answers, strict=True))[:count]):
        phases.begin("measuring noise, prompt", phases.far_text(place + 1, count))
        measure(place, item, continuation)


def forget_request(hf_model: Any) -> None:
    """Reset the state that a request left on the model: Qwen-VL keeps the position offsets of its last images."""
    for module in hf_model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def forward(hf_model: Any, inputs: Mapping[str, Tensor], *, hidden: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the model's logits [B, S, V] and, if requested, the hidden states of its layers [B, S, D]."""
    forget_request(hf_model)
    with torch.no_grad():
        options = {"output_hidden_states": True} if hidden else {}
        out = hf_model(**inputs, use_cache=False, **options)
    return out.logits, tuple(getattr(out, "hidden_states", None) or ())


def other_orders(
    hf_model: Any, inputs: Mapping[str, Tensor], *, prompt_tokens: int, has_media: bool, batches: bool = True
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (description, a call that gives the logits [S, V]) for every way to sum the same products in another order.

    A batch of repeated rows changes the tiling of matrix products; so do two chunks with a cache (text only: an image
    must be in one chunk with its tokens), and on a CPU another number of threads. batches: False if batching is tested.
    """
    length = inputs["input_ids"].shape[1]
    yield TWICE, lambda: forward(hf_model, inputs)[0][0]
    if batches:
        for count in BATCHES:
            rows = {name: torch.cat([tensor] * count) for name, tensor in inputs.items()}
            yield f"in a batch of {count}", lambda rows=rows: forward(hf_model, rows)[0][0]  # type: ignore[misc]
    if not has_media:
        middle = prompt_tokens + (length - prompt_tokens) // 2
        cuts = {"within the prompt": prompt_tokens // 2, "before the answer": prompt_tokens, "within the answer": middle}
        for place, cut in cuts.items():
            if 0 < cut < length:
                yield f"in two chunks, split {place}", lambda cut=cut: _in_pieces(hf_model, inputs, cut)  # type: ignore[misc]
    if inputs["input_ids"].device.type == "cpu":
        threads = 2 if torch.get_num_threads() == 1 else 1
        yield f"on {threads} CPU thread{'s' * (threads > 1)}", lambda: _on_threads(hf_model, inputs, threads)


def _in_pieces(hf_model: Any, inputs: Mapping[str, Tensor], cut: int) -> Tensor:
    forget_request(hf_model)
    length = inputs["input_ids"].shape[1]
    rows = {name: tensor for name, tensor in inputs.items() if tuple(tensor.shape) == (1, length)}
    with torch.no_grad():
        first = hf_model(**{name: tensor[:, :cut] for name, tensor in rows.items()}, use_cache=True)
        rest = {name: tensor[:, cut:] for name, tensor in rows.items() if name != "attention_mask"}
        second = hf_model(**rest, attention_mask=rows["attention_mask"], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits[0], second.logits[0]])


def _on_threads(hf_model: Any, inputs: Mapping[str, Tensor], count: int) -> Tensor:
    with cpu_threads(count):
        return forward(hf_model, inputs)[0][0]


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with another number of CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def rounded_layers(hf_model: Any, seed: int) -> Iterator[None]:
    """Add a random rounding to every layer's output: each value moves by a uniform number of up to one step of its
    dtype.

    This is the noise of a route that rounds as often and as finely, but to other values. An embedding only looks up
    rows, rounds nothing and is not changed.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def moved(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        takes_floats = any(isinstance(value, Tensor) and value.is_floating_point() for value in inputs)
        if not takes_floats or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if output.device not in generators:
            generators[output.device] = torch.Generator(device=output.device).manual_seed(seed)
        return moved_by_a_step(output, generators[output.device])

    passing = (torch.nn.Identity, torch.nn.Dropout)
    layers = [m for m in hf_model.modules() if not any(m.children()) and not isinstance(m, passing)]
    handles = [layer.register_forward_hook(moved) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def moved_by_a_step(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return values moved by a uniform number between minus and plus one step of their dtype, and rounded to it."""
    wide = values.float()
    noise = torch.rand(wide.shape, generator=generator, device=wide.device).mul_(2).sub_(1)
    return noise.mul_(steps_of(wide, values.dtype)).add_(wide).to(values.dtype)


def steps_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of a dtype's numbers at float32 or float64 values, as a power of two made from its exponent's bits:
    `torch.ldexp` computes a power for each value."""
    bits, bias, whole = (52, 1023, torch.int64) if values.dtype == torch.float64 else (23, 127, torch.int32)
    shift = bias - 1 + int(math.log2(torch.finfo(dtype).eps))
    return (torch.frexp(values).exponent.to(whole).add_(shift).clamp_(min=1) << bits).view(values.dtype)


def drawn_runs(hf_model: Any, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (description, a call that gives the logits [S, V]) for every run with random roundings."""

    def run(seed: int) -> Tensor:
        with rounded_layers(hf_model, seed):
            return forward(hf_model, inputs)[0][0]

    for seed in range(1, DRAWS + 1):
        yield f"every layer rounded at random ({seed})", lambda seed=seed: run(seed)  # type: ignore[misc]


Runs = Iterator[tuple[str, Callable[[], Tensor]]]


def measure_noise(
    prompt_id: str, once: Tensor, orders: Runs, draws: Runs | None = None
) -> tuple[tuple[Noise, ...], tuple[str, ...]]:
    """Return the differences between the runs of one route, and the changes that its model or memory did not allow.

    Every two orders are compared; runs with random roundings are compared only with the first run.
    Memory: the logits of all runs on the host; two of them at a time on the device.
    """
    device, runs, skipped = once.device, {ONCE: once.cpu()}, []
    randomized: dict[str, Tensor] = {}
    for into, which in ((runs, orders), (randomized, draws or iter(()))):
        for name, run in which:
            try:
                into[name] = run().cpu()
            except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as exc:
                words = str(exc).strip().splitlines() or [""]
                skipped.append(f"{prompt_id}, {name}: {type(exc).__name__}: {words[0][:160]}")

    def pairs(where: torch.device) -> tuple[Noise, ...]:
        return noise_between(prompt_id, runs, where) + drawn_noise(prompt_id, ONCE, runs[ONCE], randomized, where)

    try:
        return pairs(device), tuple(skipped)
    except torch.OutOfMemoryError:  # the model fills the card
        return pairs(torch.device("cpu")), tuple(skipped)


def padded_batch(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return text rows of several lengths as one batch, padded on the right with masked tokens.

    Padding on the right changes no token's position; with a causal mask, no real token attends to the padding.
    """
    longest = max(row["input_ids"].shape[1] for row in rows)
    tensors = {}
    for name in rows[0]:
        filled = [torch.nn.functional.pad(row[name], (0, longest - row[name].shape[1])) for row in rows]
        tensors[name] = torch.cat(filled)
    return tensors
