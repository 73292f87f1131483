"""trimtab."""

from trimtab.api import inspect, load, plan
