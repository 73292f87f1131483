"""How is a merge made and checked?"""

from trimtab.merging.changes.request import MergeRequest, Part, parse_adapter, parse_adapters
from trimtab.merging.merge import merge, merge_request
from trimtab.merging.report import MergeCheck, MergeReport

__all__ = [
    "MergeCheck", "MergeReport", "MergeRequest", "Part", "merge", "merge_request", "parse_adapter",
    "parse_adapters",
]  # fmt: skip
