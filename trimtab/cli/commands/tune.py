"""`trimtab tune`: measures launch configurations."""

from __future__ import annotations

import argparse
import sys

from trimtab.cli.flags.flags import add_placement, check_folder_of, plan_or_request
from trimtab.cli.flags.opening import planned
from trimtab.cli.flags.output import Command, print_json, print_text
from trimtab.errors import RequestError
from trimtab.process import phases

# The 4-bit kernels decode each weight once for up to this many rows (engine/cuda/launch_config.py).
MOST_ROWS = 8


def add(command: Command) -> None:
    """Add the command."""
    tuned = command("tune", run_tune, "tune the launch configurations of the GPU kernels for this card")
    add_placement(tuned, model_help="a checkpoint folder, a hub id in the local cache, or a saved plan")
    tuned.add_argument("--rows", type=int, default=8, metavar="N", help="rows decoded together, 1 to 8 (default: 8)")
    tuned.add_argument("--export", metavar="FILE", help="write every tuned configuration of this card to a file")


def run_tune(options: argparse.Namespace) -> int:
    import trimtab
    from trimtab.process.files import write_text

    if not 1 <= options.rows <= MOST_ROWS:
        raise RequestError(f"must be between 1 and {MOST_ROWS}", field="--rows", value=options.rows)
    source = plan_or_request(options, batch=options.rows, images=0, audio_s=0.0, head="auto", dtype="auto")
    check_folder_of(options.export, "--export")
    plan = planned(source)
    if not plan.execution_device.startswith("cuda"):
        raise RequestError(
            f"the model runs on {plan.execution_device}; launch configurations are of GPU kernels", field="device",
            value=plan.execution_device, allowed=("cuda", "cuda:N"),
        )  # fmt: skip
    with trimtab.load(plan) as model:
        from trimtab.engine.tune import tune_model

        progress = phases.counting("measuring kernels on this GPU,")
        report, document = tune_model(model, rows=options.rows, progress=progress)
    if options.export:
        from trimtab.engine.cuda import shipped_configs

        write_text(options.export, shipped_configs.to_text(document), field="--export")
    if options.json:
        print_json(report.to_json())
        return 0
    print_text(report)
    if options.export:
        print_text(f"written: {options.export}", file=sys.stderr)
    return 0
