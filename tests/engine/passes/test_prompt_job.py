"""A prompt in progress goes on only as it may."""

import pytest

from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.passes.chunk_forward import Chunk
from trimtab.engine.passes.prompt_job import PromptJob, Stage

CHUNKS = [Chunk(0, 16, 16, is_last=False), Chunk(16, 5, 16, is_last=True)]


def job(chunks, media=None):
    return PromptJob(list(chunks), media, 0, None, Match())


def test_a_prompt_is_complete_with_its_last_chunk():
    one = job(CHUNKS)
    assert [one.end_chunk(ends_in_step=False) for _ in CHUNKS] == [False, True]
    assert one.stage is Stage.COMPLETE
    with pytest.raises(ValueError, match="chunks cannot follow complete"):
        one.enter(Stage.CHUNKS)


def test_a_step_computes_what_is_left():
    one = job(CHUNKS[:1])
    assert one.end_chunk(ends_in_step=True) and one.stage is Stage.COMPLETE


def test_towers_come_before_chunks_and_once():
    one = job(CHUNKS, media=object())
    with pytest.raises(ValueError, match="complete cannot follow towers"):
        one.enter(Stage.COMPLETE)
    one.enter(Stage.CHUNKS)
    with pytest.raises(ValueError, match="towers cannot follow chunks"):
        one.enter(Stage.TOWERS)
    one.cut([Chunk(0, 21, 64, is_last=True)])
    assert one.end_chunk(ends_in_step=False) and one.media is None
