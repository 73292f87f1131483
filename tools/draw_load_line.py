"""Draw docs/images/load-line.svg: a real plan of an E4B-size Gemma 4 with a multimodal adapter for a small card.

    python tools/draw_load_line.py [--gpu-memory 4GiB]

Planned from the config and the adapter's header alone, for the machine written below and the assumed rates of Rates, so
that the picture is the same wherever it is drawn. Needs transformers and no GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.checkpoints import config_of, write_adapter  # noqa: E402
from trimtab.adapters.adapter import match_adapter, read_adapter  # noqa: E402
from trimtab.checkpoint.folder import read_checkpoint  # noqa: E402
from trimtab.engine.loader import transformers_model as hf  # noqa: E402
from trimtab.planning import Machine, Plan, Rates, make_plan  # noqa: E402
from trimtab.planning.plan.chart import draw  # noqa: E402
from trimtab.request import LoadRequest, parse_bytes  # noqa: E402

GIB = 2**30
PICTURE = ROOT / "docs" / "images" / "load-line.svg"


def plan_of(gpu_memory: str, folder: Path) -> Plan:
    """Return the plan of an E4B-size model with one adapter of rank 8 for a budget on a card of 8 GiB."""
    config = config_of("e4b")
    config.architectures = ["Gemma4ForConditionalGeneration"]
    config.save_pretrained(folder / "gemma-4-E4B")
    write_adapter(folder / "gemma-4-E4B", folder / "medical", 8)
    request = LoadRequest(
        model=str(folder / "gemma-4-E4B"), adapters={"medical": str(folder / "medical")}, quant="nf4-dq",
        gpu_memory_bytes=parse_bytes(gpu_memory, field_name="--gpu-memory"), host_memory_bytes=16 * GIB,
    )  # fmt: skip
    anatomy = hf.read_anatomy(read_checkpoint(request.model), quant=request.quant, dtype=request.dtype)
    adapter = match_adapter(read_adapter(request.adapters["medical"]), anatomy)
    machine = Machine(
        execution_device="cuda:0", gpu_total_bytes=8 * GIB, gpu_free_bytes=7 * GIB, host_available_bytes=24 * GIB
    )
    return make_plan(
        request, anatomy, adapters={"medical": adapter.nbytes("float32")}, machine=machine, rates=Rates(),
        disk_free_bytes=100 * GIB,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory", default="4GiB")
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_of(parser.parse_args().gpu_memory, Path(scratch))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(plan, PICTURE)
    print(plan)


if __name__ == "__main__":
    main()
