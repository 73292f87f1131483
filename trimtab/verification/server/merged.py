"""trimtab's answers with an adapter on fused experts, from the base and a merged checkpoint: only a merge can apply it.

Each hypothesis is merged into a folder, which is removed before the next one, and loaded in addition to the base: two
models in memory and one more checkpoint on disk at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.adapters.adapter import AdapterSpec, AdapterTarget, match_adapter
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.adapters.keys import own_path
from trimtab.api import load, plan_request
from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.headers import read_header
from trimtab.engine.loader import transformers_model as hf
from trimtab.errors import CheckpointError
from trimtab.merging import merge as merge_adapters
from trimtab.merging.changes import experts
from trimtab.merging.files import layout as shards
from trimtab.process.json_file import read_object
from trimtab.request import LoadRequest
from trimtab.verification.server.channels import Question
from trimtab.verification.server.local import Reference


def names_experts(folder: str | Path) -> bool:
    """Return whether an adapter's files name experts; False if they cannot be read, which is reported elsewhere."""
    path = Path(folder)
    try:
        config, tensors = read_object(path / CONFIG_NAME, CONFIG_NAME), read_header(path / TENSORS_NAME).tensors
    except CheckpointError:
        return False
    return bool(config.get("target_parameters")) or any(".experts." in name for name in tensors)


def experts_spec(checkpoint: Checkpoint, folder: str | Path) -> AdapterSpec | None:
    """Return the adapter with its pairs on fused experts among the targets (kind "experts"); None if it has none.

    Errors: AdapterError if it does not match the model.
    """
    probe = hf.probe(checkpoint, shards.config_dtype(checkpoint.config))
    anatomy = hf.anatomy_of(probe, checkpoint, quant="none")
    file, stacks = experts.read_with_stacks(str(folder), probe, checkpoint.tensors)
    if not stacks:
        return None
    spec = match_adapter(file, anatomy) if file.tensors else AdapterSpec(file, (), (), "")
    pairs = {**stacks.by_parameter, **{leaf.removesuffix(".weight"): pair for leaf, pair in stacks.by_leaf.items()}}
    targets = [
        AdapterTarget(
            path, "language", "experts", pair.A.shape[0] // pair.experts, pair.scale, False, False, False,
            {"A": pair.A, "B": pair.B}, _spelled(path, pair.A.tensor_name),
        )
        for path, pair in pairs.items()
    ]  # fmt: skip
    config = read_object(Path(folder) / CONFIG_NAME, CONFIG_NAME)
    whole = replace(file, config=config, tensors={**file.tensors, **_entries(targets)})
    return replace(spec, file=whole, targets=(*spec.targets, *targets))


def _spelled(path: str, key: str) -> str:
    """Return the path of a pair in rank_pattern and alpha_pattern: for a stack, it ends with the parameter."""
    own = own_path(key.partition(".lora_A")[0]).replace(".base_layer", "")
    parameter = path.rpartition(".")[2]
    return f"{own}.{parameter}" if own.endswith("experts") else own


def _entries(targets: Sequence[AdapterTarget]) -> dict[str, Any]:
    return {entry.tensor_name: entry for target in targets for entry in target.tensors.values()}


class MergedReference(Reference):
    """A base that answers as itself, or as a merged checkpoint instead of an attached adapter."""

    def __init__(self, base: Any, adapter: str, spec: AdapterSpec, placed: LoadRequest, work: Path) -> None:
        super().__init__(base, adapter)
        self._spec, self._placed, self._work = spec, placed, work
        self._folder = self._own = spec.file.folder
        self._merged: Any = None
        self._open = ExitStack()

    @property
    def spec(self) -> AdapterSpec:
        return self._spec

    def close(self) -> None:
        """Free the merged model's memory and disk space."""
        self._open.close()
        self._merged = None

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Answer as the merged model, or as the base (None)."""
        base = self.model
        if name is not None:
            self.model = self._loaded()
        try:
            yield
        finally:
            self.model = base

    @contextmanager
    def instead(self, folder: Path) -> Iterator[str]:
        """Merge another adapter instead of the attached one while the block runs. Errors: AdapterError."""
        self._take(folder)
        try:
            yield self.adapter
        finally:
            self._take(self._own)

    def greedy(self, question: Question, name: str | None, new_tokens: int) -> tuple[int, ...]:
        self.inputs(question)
        with self.using(name):
            return super().greedy(question, None, new_tokens)

    def sample(self, ids: Sequence[int], name: str | None, *, seed: int) -> tuple[int, ...]:
        with self.using(name):
            return super().sample(ids, None, seed=seed)

    def _take(self, folder: Path) -> None:
        self.close()
        self._folder = folder

    def _loaded(self) -> Any:
        if self._merged is None:
            out = self._work / "merged"
            self._open.callback(shutil.rmtree, out, ignore_errors=True)
            merge_adapters(self._placed.model, out, adapters={self.adapter: self._folder}, overwrite=out.exists())
            plan = plan_request(replace(self._placed, model=str(out)))
            self._merged = self._open.enter_context(load(plan, decode="eager"))
        return self._merged


@contextmanager
def open_merged(placed: LoadRequest, quant: str, adapter: str, spec: AdapterSpec, work: Path) -> Iterator[MergedReference]:
    """Load the base in one precision; the adapter's merged checkpoint is made and loaded on demand.

    work: folder of the merged checkpoint. Errors: those of planning, merging and loading.
    """
    request = replace(placed, quant=quant, adapters={})
    with load(plan_request(request), decode="eager") as base:
        reference = MergedReference(base, adapter, spec, request, work)
        try:
            yield reference
        finally:
            reference.close()


def spec_with_experts(model: str | Path, folder: str | Path) -> AdapterSpec | None:
    """Return the adapter's spec if it changes fused experts of the model, else None."""
    return experts_spec(read_checkpoint(model), folder) if names_experts(folder) else None
