"""What Schemathesis loads: names that this server knows, in bodies that name others, so that requests get past the names."""

from __future__ import annotations

import schemathesis

NAMES = {"model": "toy", "lora_path": "style"}


@schemathesis.hook
def map_body(context, body):
    """Return a body as wrong or right as before: one name takes another one's place."""
    if not isinstance(body, dict):
        return body
    known = {
        name: value for name, value in NAMES.items() if isinstance(body.get(name), str) and 0 < len(body[name]) <= 200
    }
    return {**body, **known}
