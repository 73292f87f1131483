"""Writes the golden records anew."""

import json

from tests.golden import FILE, record

FILE.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
