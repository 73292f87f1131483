"""How does a test of the server start a worker at little cost? From a fork server that has imported the toys and pytest, which is
their main module. The product starts each in a fresh interpreter, as the servers of test_serve_run.py do."""

import multiprocessing
import sys

import pytest


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    """Fork each process that would be spawned, where the system can."""
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "tests.toy_worker", "tests.leaky_worker"])
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
