"""Merging: adapters merged into a checkpoint, in little memory, and the check of the result. Imports no torch."""

from trimtab.merge.merge import merge, merge_request
from trimtab.merge.report import MergeCheck, MergeReport, merge_text
from trimtab.merge.request import MergeRequest, Part, parse_adapter, parse_adapters

__all__ = [
    "MergeCheck", "MergeReport", "MergeRequest", "Part", "merge", "merge_request", "merge_text", "parse_adapter",
    "parse_adapters",
]  # fmt: skip
