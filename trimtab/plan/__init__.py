"""Planning: blocks, their costs, and the plan that places them. Pure: no torch, no files except saved plans."""

from trimtab.plan.blocks import Block, blocks_of
from trimtab.plan.cost import Rates
from trimtab.plan.machine import Machine
from trimtab.plan.plan import Plan
from trimtab.plan.planner import make_plan
from trimtab.plan.rows import Placement, Unquantized

__all__ = ["Block", "Machine", "Placement", "Plan", "Rates", "Unquantized", "blocks_of", "make_plan"]
