"""Questions and answers on the GPU: the CPU's tests with the device changed, rows from captured steps."""

from tests.engine.batch.test_generate import *
