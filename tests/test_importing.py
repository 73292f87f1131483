"""bitsandbytes is imported without code from the hub and without a warning."""

from __future__ import annotations

import logging
import subprocess
import sys

from trimtab.runtime.importing import without_hub_kernels


def test_a_process_that_quantizes_says_nothing_and_asks_for_no_kernels(tmp_path):
    (tmp_path / "kernels.py").write_text("raise SystemExit('asked for the hub')")
    code = "import trimtab.runtime.quant, sys; print('kernels' in sys.modules, 'bitsandbytes' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert made.stdout.split() == ["False", "True"] and "kernels" not in made.stderr


def test_what_was_imported_before_comes_back(monkeypatch):
    stands = object()
    monkeypatch.setitem(sys.modules, "kernels", stands)
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = log.level
    with without_hub_kernels():
        assert sys.modules["kernels"] is None and log.level == logging.ERROR
    assert sys.modules["kernels"] is stands and log.level == before
