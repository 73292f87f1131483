"""The renames that the installed transformers applies to checkpoints of a model, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.checkpoint.renames import Rename

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel

# Others convert values too, or depend on which names were seen before.
_KINDS = ("WeightRenaming", "PrefixChange")


def read_renames(model: HFModel) -> tuple[Rename, ...]:
    """Return the model's renames in the order in which they apply, those of its sub-models included.

    Source: transformers 5.6.2 to 5.23.0, conversion_mapping.py get_model_conversion_mapping; 5.6.2 writes the prefix of a
    sub-model into its patterns, later releases hold it apart.
    """
    from transformers import conversion_mapping

    return tuple(
        Rename(
            getattr(transform, "base_model_prefix", None) or "" if scope is not None else "", scope or "",
            transform.source_patterns[0], transform.target_patterns[0],
        )
        for transform in conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        if type(transform).__name__ in _KINDS
        for scope in (getattr(transform, "scope_prefix", None),)
    )  # fmt: skip
