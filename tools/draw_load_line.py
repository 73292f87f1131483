"""Draw docs/images/load-line.svg: the plan of an E4B-size Gemma 4 with a multimodal adapter for a laptop's card.

    python tools/draw_load_line.py

`trimtab plan` draws it from the config and the adapter's header alone. The card has a profile, so the image is the same
wherever it is drawn. Needs transformers and no GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.checkpoints import CLASSES, config_of, write_adapter  # noqa: E402
from trimtab.cli import main as cli  # noqa: E402

IMAGE = ROOT / "docs" / "images" / "load-line.svg"


def main() -> int:
    """Draw it, and return the command's exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        model, adapter = Path(scratch, "gemma-4-E4B"), Path(scratch, "medical")
        config = config_of("e4b")
        config.architectures, config.dtype = [CLASSES["e4b"]], "bfloat16"
        config.save_pretrained(model)
        write_adapter(model, adapter, 8)
        words = ["--card", "RTX 3050 laptop 4GB", "--host-memory", "16GiB", "--picture", str(IMAGE)]
        return cli.main(["plan", str(model), "--adapter", str(adapter), *words])


if __name__ == "__main__":
    sys.exit(main())
