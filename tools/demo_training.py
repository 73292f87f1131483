"""How the base and each adapter are trained: one loop, answer tokens only, pictures, sounds and text in every batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_data import Media, PromptTable, to_patches
from demo_forward import KINDS, Batch, Constants, Hints, losses, set_clip_bounds, share_right
from torch.nn import functional

LOG_EVERY = 50
LOSSES = (*KINDS, "image hint", "audio hint")
GRAPH_AFTER = 12


@dataclass(frozen=True)
class Schedule:
    """How long and how fast one stage trains. Rows are pictures, sounds and texts in each batch."""

    steps: int
    learning_rate: float
    rows: tuple[int, int, int] = (64, 40, 48)
    warmup_steps: int = 200
    weight_decay: float = 0.01
    evaluate_every: int = 1000
    save_every: int = 2000
    # The base sets its clip bounds this far into training, from what it sees then, and goes on training within them.
    clip_at: float | None = None
    # The weight of the towers' hints, until the clip bounds are set.
    hint_weight: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine to one hundredth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        part = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, part))))


class Dice:
    """The random draws of one run, on the device and (for what the GPU must not be asked) on the CPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.on_device = torch.Generator(device).manual_seed(seed)
        self.on_cpu = torch.Generator().manual_seed(seed + 1)

    def pick(self, limit: int, count: int) -> torch.Tensor:
        return torch.randint(limit, (count,), generator=self.on_device, device=self.device)

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.on_device, device=self.device)

    def shift(self, most: int) -> int:
        return int(torch.randint(-most, most + 1, (1,), generator=self.on_cpu))

    def state(self) -> dict[str, torch.Tensor]:
        return {"device": self.on_device.get_state(), "cpu": self.on_cpu.get_state()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.on_device.set_state(state["device"].cpu())
        self.on_cpu.set_state(state["cpu"].cpu())


@dataclass
class TrainingSet:
    """Media and prompts of one voice. `echoes` are text prompts that belong to no thing."""

    media: Media
    tables: dict[str, PromptTable]
    echoes: PromptTable | None = None
    echo_share: float = 0.3
    width: int = field(init=False)

    def __post_init__(self) -> None:
        every = [*self.tables.values(), *([self.echoes] if self.echoes else [])]
        # A multiple of 8 suits the attention kernels' masks.
        self.width = -(-max(table.ids.shape[1] for table in every) // 8) * 8
        for table in every:
            table.ids = functional.pad(table.ids, (0, self.width - table.ids.shape[1]))

    def to(self, device: torch.device) -> TrainingSet:
        self.media = self.media.to(device)
        self.tables = {kind: table.to(device) for kind, table in self.tables.items()}
        self.echoes = self.echoes.to(device) if self.echoes else None
        return self

    def draw(self, rows: tuple[int, int, int], dice: Dice) -> Batch:
        """Return a random batch; its media are shifted by up to 2 pixels or 3 frames and get a little noise."""
        images, sounds, texts = rows
        seen, heard = dice.pick(len(self.media.pictures), images), dice.pick(len(self.media.sounds), sounds)
        echoes = int(texts * self.echo_share) if self.echoes else 0
        picked = [
            _of_things(self.tables["image"], self.media.picture_things[seen], dice),
            _of_things(self.tables["audio"], self.media.sound_things[heard], dice),
            self.tables["text"].take(dice.pick(len(self.tables["text"].ids), texts - echoes)),
        ]
        if self.echoes:
            picked.append(self.echoes.take(dice.pick(len(self.echoes.ids), echoes)))
        ids, start, tokens = (torch.cat(parts) for parts in zip(*picked))
        # One shift for the whole batch.
        pixels = to_patches(torch.roll(self.media.pictures[seen], (dice.shift(2), dice.shift(2)), (2, 3)))
        features = torch.roll(self.media.sounds[heard].float(), dice.shift(3), 1)
        pixels, features = pixels + 0.02 * dice.noise(pixels), features + 0.1 * dice.noise(features)
        named = (self.media.picture_labels[seen], self.media.sound_labels[heard])
        return Batch(ids, start, tokens, pixels, features, *named)


def _of_things(table: PromptTable, things: torch.Tensor, dice: Dice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return table.take(things * table.per_thing + dice.pick(table.per_thing, len(things)))


class Step:
    """One optimizer step on a batch, recorded as a CUDA graph where there is a GPU and the recording works."""

    def __init__(self, gemma: Any, schedule: Schedule, constants: Constants, say: Callable[[str], None]) -> None:
        self.gemma, self.schedule, self.constants, self.say = gemma, schedule, constants, say
        self.device = next(gemma.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        width = gemma.config.text_config.hidden_size
        self.hints = Hints(width).to(self.device) if schedule.hint_weight else None
        self.hint_weight = torch.tensor(schedule.hint_weight, device=self.device)
        trained = [*gemma.parameters(), *(self.hints.parameters() if self.hints else ())]
        self.parameters = [parameter for parameter in trained if parameter.requires_grad]
        matrices = [parameter for parameter in self.parameters if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters if parameter.dim() < 2]
        # A tensor, so that a recorded step reads the new value.
        self.rate = torch.tensor(0.0, device=self.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate, betas=(0.9, 0.98), fused=True if self.on_gpu else None, capturable=self.on_gpu,
        )  # fmt: skip
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: Batch | None = None
        self.trained = 0
        self.loss = torch.zeros(len(LOSSES), device=self.device)

    def __call__(self, batch: Batch, step: int) -> torch.Tensor:
        """Train on the batch; return the losses on the device, in the order of LOSSES (valid until the next call)."""
        self.rate.fill_(self.schedule.rate(step))
        if not self.on_gpu:
            self._train(batch)
            return self.loss
        if self.held is None:
            self.held = Batch(*(tensor.clone() for tensor in vars(batch).values()))
        self.held.copy_(batch)
        if self.trained == GRAPH_AFTER:
            self._record(self.held)
        self.trained += 1
        if self.graph is not None:
            self.graph.replay()
        else:
            self._train_aside(self.held)
        return self.loss

    def _train(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        each = losses(self.gemma, batch, self.constants, self.hints)
        (each[:3].sum() + self.hint_weight * each[3:].sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.loss.copy_(each.detach())

    def _train_aside(self, batch: Batch) -> None:
        if self.trained > GRAPH_AFTER:
            return self._train(batch)
        # The steps before a recording have to run on a stream of their own.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._train(batch)
        torch.cuda.current_stream().wait_stream(stream)
        return None

    def _record(self, batch: Batch) -> None:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph):
                self._train(batch)
            self.graph = graph
            self.say("a step is now one CUDA graph")
        except RuntimeError as exc:
            torch.cuda.synchronize()
            self.optimizer.zero_grad(set_to_none=True)
            self.say(f"no CUDA graph, going on without ({str(exc).splitlines()[0]})")


@dataclass(frozen=True)
class Stage:
    """One stage of training: what is trained on what, how long, from which seed, and where an interrupted run goes on.

    `report(figures)` is called every 50 steps with the losses, and with accuracies where they were measured.
    """

    data: TrainingSet
    held_out: list[Batch]
    schedule: Schedule
    seed: int
    state_file: Path
    report: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]


def train(gemma: Any, stage: Stage) -> dict[str, Any]:
    """Train in place; return the stage's log. Goes on from the stage's state file if an interrupted run left one."""
    schedule, device = stage.schedule, next(gemma.parameters()).device
    constants = Constants(gemma, stage.data.width)
    dice, step_once = Dice(stage.seed, device), Step(gemma, schedule, constants, stage.say)
    start, curve = _resume(gemma, step_once, dice, stage)
    clip_step = int(schedule.steps * schedule.clip_at) if schedule.clip_at else -1
    began = time.perf_counter() - (curve[-1]["seconds"] if curve else 0.0)
    total, counted = torch.zeros(len(LOSSES), device=device), 0
    for step in range(start, schedule.steps):
        if step == clip_step:
            batches = [stage.data.draw(schedule.rows, dice) for _ in range(8)]
            stage.say(f"{set_clip_bounds(gemma, batches, constants)} clipped linears have their bounds now")
            step_once.hint_weight.zero_()
        total += step_once(stage.data.draw(schedule.rows, dice), step)
        done, counted = step + 1, counted + 1
        if done % LOG_EVERY == 0 or done == schedule.steps:
            loss = {kind: round(float(value) / counted, 4) for kind, value in zip(LOSSES, total)}
            figures: dict[str, Any] = {"step": done, "rate": round(schedule.rate(step), 7), "loss": loss}
            if done % schedule.evaluate_every == 0 or done == schedule.steps:
                figures["held_out"] = share_right(gemma, stage.held_out, constants)
            figures["seconds"] = round(time.perf_counter() - began, 1)
            curve.append(figures)
            stage.report(figures)
            total.zero_()
            counted = 0
            if not math.isfinite(sum(loss.values())):
                raise FloatingPointError(f"the loss is not finite at step {done}: {loss}")
        if done % schedule.save_every == 0 and done < schedule.steps:
            _save_state(gemma, step_once, dice, stage.state_file, done, curve)
    stage.state_file.unlink(missing_ok=True)
    return {
        "steps": schedule.steps, "rows": list(schedule.rows), "learning_rate": schedule.learning_rate,
        "seed": stage.seed, "seconds": round(time.perf_counter() - began, 1), "width_tokens": stage.data.width,
        "cuda_graph": step_once.graph is not None, "curve": curve,
    }  # fmt: skip


def _save_state(gemma: Any, step_once: Step, dice: Dice, path: Path, step: int, curve: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step, "curve": curve, "model": gemma.state_dict(), "optimizer": step_once.optimizer.state_dict(),
        "dice": dice.state(), "hint_weight": step_once.hint_weight,
        "hints": step_once.hints.state_dict() if step_once.hints else {},
    }  # fmt: skip
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _resume(gemma: Any, step_once: Step, dice: Dice, stage: Stage) -> tuple[int, list[dict[str, Any]]]:
    if not stage.state_file.exists():
        return 0, []
    state = torch.load(stage.state_file, map_location=step_once.device, weights_only=True)
    gemma.load_state_dict(state["model"])
    step_once.optimizer.load_state_dict(state["optimizer"])
    for group in step_once.optimizer.param_groups:
        # Loading put the saved rate in its place; a step writes into this tensor.
        group["lr"] = step_once.rate
    step_once.hint_weight.copy_(state["hint_weight"])
    if step_once.hints:
        step_once.hints.load_state_dict(state["hints"])
    dice.restore(state["dice"])
    stage.say(f"going on from step {state['step']} of {stage.schedule.steps}")
    return state["step"], state["curve"]
