"""Model inputs on the GPU: the CPU's tests with the device changed."""

from tests.engine.chat.test_chat import *
