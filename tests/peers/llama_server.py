"""llama-cpp-python's server with a scale for each adapter, which its settings lack: `llama_server.py CONFIG.json SCALES.json`.

SCALES.json: path of an adapter -> scale, as llama.cpp's own server takes it in --lora-scaled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.settings import ConfigFileSettings


class Scaled(llama_cpp.Llama):
    """A model whose adapter has a scale."""

    def __init__(self, *args: Any, lora_path: str | None = None, **options: Any) -> None:
        scale = SCALES.get(lora_path, 1.0)
        super().__init__(*args, lora_path=lora_path, lora_scale=scale, **options)


if __name__ == "__main__":
    SCALES = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    llama_cpp.Llama = Scaled
    settings = ConfigFileSettings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    uvicorn.run(create_app(server_settings=settings, model_settings=settings.models), host=settings.host, port=settings.port)
