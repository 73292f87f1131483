"""The tests: a folder for each room of the package, named as the room; helpers of several rooms are here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
