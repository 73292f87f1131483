"""Copies of streamed towers between captured chunks, with CUDA's own streams and graphs: more than tests/test_tower_copies.py."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.test_memory import GPU, big_groups, views_of
from tests.test_tower_copies import *
from trimtab.runtime import tiers
from trimtab.runtime.capturing import side_stream
from trimtab.runtime.graph_cache import GraphCache
from trimtab.runtime.step_capture import in_pass


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_towers_between_replays_read_their_own_bytes(slots, pieces, layers):
    """Slow kernels are queued without a wait; a copy that is too early or too late would change their sums."""
    towers = 3
    groups, expected = big_groups(towers + layers, 16 * 2**20, pieces)
    streamer = tiers.Streamer(GPU, [group for group, _ in groups], slot_count=slots)
    streamer.poison = True
    order = [piece for group, _ in groups[:towers] for piece in group.pieces]
    decoder = [piece for group, _ in groups[towers:] for piece in group.pieces]
    sums = torch.zeros(max(layers, 1) * pieces, dtype=torch.long, device=GPU)

    def compute(some, store):
        number = 0
        for group, places in some:
            for view in views_of(streamer, group, places):
                torch.cuda._sleep(1_000_000)
                store(number, view.sum())
                number += 1
            streamer.leave(group)

    def chunk():
        with in_pass(streamer, decoder):
            torch.cuda._sleep(1_000_000)
            compute(groups[towers:], lambda number, value: sums[number].copy_(value))

    cache = GraphCache()
    with side_stream(GPU) as side:
        with torch.cuda.stream(side):
            compute(groups, lambda _, value: None)  # once for whatever is made on first use
        torch.cuda.synchronize()
        graph, _ = cache.record(side, chunk)
    cache["chunk",] = graph
    found, replayed = [], []
    for number in range(12):
        if number % 4 != 3:  # an image
            streamer.expect(order, streamer.replayed)
            with side_stream(GPU) as side, torch.cuda.stream(side):
                compute(groups[:towers] if number % 5 != 4 else groups[:2], lambda _, value: found.append(value))
                streamer.end_expected()
            torch.cuda.current_stream(GPU).wait_stream(side)
        for _ in range(number % 3):
            sums.zero_()
            tiers.replay(streamer, decoder, graph)
            replayed.append(sums.clone())
    each = towers * pieces
    wanted = []
    for number in range(12):
        if number % 4 != 3:
            wanted += expected[: each if number % 5 != 4 else 2 * pieces]
    assert [int(one) for one in found] == wanted
    if layers:
        assert [one.tolist() for one in replayed] == [expected[each:]] * len(replayed)
    cache.clear()
    streamer.close()


def test_a_chunk_without_streamed_layers_does_not_wait_for_the_next_image_s_block():
    """The tower's first block goes into its buffer while the chunk computes: measured on the device's own clock."""
    groups, _ = big_groups(4, 256 * 2**20, 1)
    streamer = tiers.Streamer(GPU, [group for group, _ in groups], slot_count=1)
    order = [piece for group, _ in groups for piece in group.pieces]

    def tower():
        streamer.expect(order, streamer.replayed)
        for group, places in groups:
            for view in views_of(streamer, group, places):
                view.sum()
            streamer.leave(group)
        streamer.end_expected()

    tower()
    torch.cuda.synchronize()
    begin, copied, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    tower()
    begin.record()
    torch.cuda._sleep(1000)
    ended.record()
    streamer._stream.record_event(copied)
    torch.cuda.synchronize()
    assert begin.elapsed_time(ended) < begin.elapsed_time(copied)
    streamer.close()
