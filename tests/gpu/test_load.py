"""Every family, format and tier on the GPU: the CPU's tests with the device changed."""

from tests.engine.loader.test_load import *
