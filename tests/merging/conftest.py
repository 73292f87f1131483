"""The model and the adapter that most merges of these tests read; none of them changes their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pico


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pico.build("llama", tmp_path_factory.mktemp("base") / "base", shards=3)


@pytest.fixture(scope="session")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pico.adapter(base, tmp_path_factory.mktemp("adapter") / "adapter")
