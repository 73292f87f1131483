"""Writes the golden records anew: all of them, or those that are named."""

import argparse

from tests.golden import RECORDED, write_records

parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECORDED)}; none: all")
given = parser.parse_args()
if unknown := sorted(set(given.names) - set(RECORDED)):
    parser.error(f"{', '.join(unknown)}: no such record (choose from {', '.join(RECORDED)})")
write_records(given.names or RECORDED)
