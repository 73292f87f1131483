"""Which placement is the cheapest, and why?"""

from trimtab.planning.plan.plan import Plan
from trimtab.planning.planner import make_plan
from trimtab.planning.values.blocks import Block, Machine, blocks_of
from trimtab.planning.values.byte_sizes import Rates
from trimtab.planning.values.rows import Placement, Unquantized

__all__ = ["Block", "Machine", "Placement", "Plan", "Rates", "Unquantized", "blocks_of", "make_plan"]
