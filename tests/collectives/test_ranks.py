"""Messages between ranks: a group that was given back serves the next one, and its old notices are not seen."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


def open_and_close(rank: int, world: int, times: int) -> int:
    """Runs on each rank. File descriptors that were added."""
    from longstraw.collectives import Ranks

    def once() -> None:
        ranks = Ranks(range(world))
        assert ranks.posted("broken") is None, "a notice of an earlier user of the group"
        assert ranks.exchange(rank) == [(one, 0, 0, 0) for one in range(world)]
        if rank == 0:
            ranks.post("broken", "text")
        ranks.exchange()
        assert ranks.posted("broken") == (0, "text")
        ranks.close()
        ranks.close()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(times):
        once()
    return len(os.listdir("/proc/self/fd")) - before


def open_side_by_side(rank: int, world: int) -> bool:
    """Runs on each rank. Whether several that are open at once, or differ, have groups of their own."""
    from longstraw.collectives import Ranks

    first, second, slow = Ranks(range(world)), Ranks(range(world)), Ranks(range(world), timedelta(seconds=50))
    lines = {id(ranks._open_line.group) for ranks in (first, second, slow)}
    for ranks in (slow, first, second):
        ranks.close()
    again = Ranks(range(world))
    told = again.exchange_text(str(again._open_line.timeout))
    again.close()
    return len(lines) == 3 and told == ["None"] * world


def sums_and_flags(rank: int, world: int) -> tuple[list[bool], list[bool], list[int], list[int]]:
    """Runs on each rank. Flags of which some, all or none are set, and numbers, over all ranks."""
    from longstraw.collectives import Ranks

    ranks = Ranks(range(world))
    flags = ranks.any_of([rank == 0, rank == 1, True, False])
    found = flags, ranks.any_of([]), ranks.total([rank, 10 * rank, -1]), ranks.total([2**40])
    ranks.close()
    return found


def runtimes(rank: int, world: int, times: int) -> int:
    """Runs on each rank. File descriptors added by runtimes that were closed, with a step in each."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from longstraw import Runtime

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8,
        )
    ).train()  # fmt: skip
    wrapped = DistributedDataParallel(model)

    def once() -> None:
        tiers = [{"kind": "host", "budget": "1MiB"}]
        with Runtime(wrapped, tiers=tiers) as runtime, runtime.transaction(torch.arange(9)) as txn:
            for lane in txn.replay([torch.arange(3)]):
                lane.backward(lane.logprobs[0].sum())

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(times):
        once()
    return len(os.listdir("/proc/self/fd")) - before


def drop_at_once(rank: int, world: int) -> bool:
    """Runs on each rank. Rank 0 drops its ranks, as a refused model does, before the other is at the board."""
    from longstraw.collectives import Ranks, ranks

    class Late(ranks.TCPStore):
        def __init__(self, *args: object, **options: object) -> None:
            time.sleep(3.0)
            super().__init__(*args, **options)

    if rank == 1:
        with patch.object(ranks, "TCPStore", Late):
            Ranks(range(world))
        return True
    Ranks(range(world))
    gc.collect()
    return True


def test_a_rank_that_is_late_finds_the_board(two: Pool) -> None:
    assert two.run(drop_at_once, timeout=30) == [True, True]


def test_a_group_is_used_again(two: Pool) -> None:
    assert two.run(open_and_close, 6, timeout=60) == [0, 0]


def test_open_at_once(two: Pool) -> None:
    assert two.run(open_side_by_side, timeout=60) == [True, True]


def test_flags_and_sums_over_all_ranks(two: Pool) -> None:
    assert two.run(sums_and_flags, timeout=60) == [([True, True, True, False], [], [1, 10, -2], [2**41])] * 2


def test_closed_runtimes_leave_no_files_open(two: Pool) -> None:
    assert two.run(runtimes, 4, timeout=120) == [0, 0]
