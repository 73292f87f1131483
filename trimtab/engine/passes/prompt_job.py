"""A prompt that is computed in chunks of a separate batch (prefill.py)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.passes.chunk_forward import Chunk
from trimtab.engine.passes.media_embeddings import Media


@dataclass(eq=False)
class PromptJob:
    """A prompt in progress: its chunks, and how many are computed. serial: of its adapter when it began. kept: the tokens that need
    no computation."""

    chunks: list[Chunk]
    media: Media | None
    offset: int
    serial: int | None
    kept: Match
    done: int = 0
    has_begun: bool = False
