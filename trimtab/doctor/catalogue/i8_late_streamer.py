"""I8: on Apple GPUs a streamer gets each token one step late."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="generate hands tokens to a streamer one step late on Apple GPUs",
    symptom="silent: the first token arrives after the second forward pass; one forward pass more than tokens",
    trigger="generate(streamer=...) with the model on \"mps\", and a cache that can be cropped or is not returned",
    cause="transformers generation/utils.py DeferredStopCheck reads the stop flag a step later to save a wait; it is "
    "for mps alone, CUDA and the CPU use StopCheck, which is immediate",
    affected=(Affected("transformers", since="5.18.0"),),
    versions="5.23.0: for mps (its own is_supported asked); in 5.18.0 and not in 5.15.0 (read in the wheels); on the "
    "CPU tokens arrive at once in 5.6.2 and 5.23.0 (run); 5.6.2 has no such class",
    way_round="none needed unless the delay matters",
    trackers=("huggingface/transformers#47975 (merged)",),
    trimtab="it runs on CUDA and on the CPU, where the check is immediate",
    evidence="source",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Read the devices with a deferred stop check, and count the steps before each token on the CPU."""
    import torch
    from transformers.generation import utils

    late = _steps_late(kit)
    if late:
        return Seen(PRESENT, f"on the CPU each token arrives {late} step(s) late")
    deferred = getattr(utils, "DeferredStopCheck", None)
    if deferred is None:
        return Seen(FIXED, "tokens arrive in the step that made them; there is no deferred check")
    kinds = [kind for kind in ("cuda", "mps") if deferred.is_supported(torch.device(kind), None, False, is_assistant=False)]
    if not kinds:
        return Seen(FIXED, "no device defers the stop check")
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    text = f"the stop check is deferred on {', '.join(kinds)}; on the CPU tokens arrive in the step that made them"
    return Seen(PRESENT if any(has[kind] for kind in kinds) else NOT_APPLICABLE, text)


def _steps_late(kit: Kit) -> int:
    """Return the number of extra forward passes before the first token arrived."""
    model = kit.load(kit.checkpoint("llama"))
    passes: list[int] = []
    arrived: list[int] = []

    class Streamer:
        def put(self, tokens: Any) -> None:
            arrived.append(len(passes))

        def end(self) -> None:
            pass

    model.register_forward_hook(lambda *_: passes.append(1))
    model.generate(**kit.inputs(model), max_new_tokens=3, do_sample=False, eos_token_id=None, streamer=Streamer())
    return arrived[1] - 1  # the first put is the prompt
