"""Captured steps on the GPU: the CPU's tests with the device changed."""

from tests.engine.decode.test_graphs import *
