"""What Schemathesis loads: names that this server knows, in bodies that name others, so that requests get past the names.

It also counts every case by operation and status, into the file that TRIMTAB_FUZZ_COUNTS names: Schemathesis' own report says
of an operation only how its valid cases ended.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from pathlib import Path

import schemathesis

NAMES = {"model": os.environ.get("TRIMTAB_FUZZ_MODEL", "toy"), "lora_path": "style"}
# Adapters of the demo model, for the field that names one or mixes two.
ADAPTERS = ("style", "specialist") if NAMES["model"] == "demo" else ()
# Tokens that every served model has.
MOST_TOKEN = 255
COUNTS = Path(os.environ["TRIMTAB_FUZZ_COUNTS"])

# Fields of a prompt that a description cannot call wrong where they are empty: another message may have a text.
TEXTS = ("content", "text", "prompt", "input", "system")

_counts: dict[str, Counter[str]] = defaultdict(Counter)
_lock = threading.Lock()


@schemathesis.hook
def before_call(context, case, **kwargs):
    """Change a body that is as wrong or right as before: one name takes another one's place, and one token id another's."""
    if not isinstance(case.body, dict):
        return
    if case.meta is not None and case.meta.generation.mode.is_positive:
        for name in ("messages", "prompt", "input", "system"):
            if name in case.body:
                case.body[name] = filled(case.body[name], name)
    for name, known in NAMES.items():
        value = case.body.get(name)
        if isinstance(value, str) and 0 < len(value) <= 200:
            case.body[name] = known
    adapter = case.body.get("adapter")
    if ADAPTERS and isinstance(adapter, str) and 0 < len(adapter) <= 200:
        case.body["adapter"] = ADAPTERS[0]
    elif ADAPTERS and isinstance(adapter, dict) and 0 < len(adapter) <= len(ADAPTERS):
        case.body["adapter"] = dict(zip(ADAPTERS, adapter.values(), strict=False))
    tokens = case.body.get("tokens")
    if isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        case.body["tokens"] = [min(token, MOST_TOKEN) for token in tokens]


def filled(value, name=""):
    """Return a right body with a letter for each empty text of its prompt: drawn ones are empty so often that some operations
    would never be answered."""
    if isinstance(value, dict):
        return {key: filled(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, name) for item in value]
    return "a" if value == "" and name in TEXTS else value


@schemathesis.hook
def after_call(context, case, response):
    with _lock:
        _counts[f"{case.operation.method.upper()} {case.operation.path}"][str(response.status_code)] += 1


@schemathesis.hook("before_load_schema")
def begin(context, raw_schema):
    import atexit

    atexit.register(lambda: COUNTS.write_text(json.dumps(_counts)))
