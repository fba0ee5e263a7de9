"""What a profile's events say of collectives: unions, not sums, and what no other kernel hides."""

from __future__ import annotations

import pytest

from benchmarks.collective_time import account, length


def test_spans_that_overlap_count_once() -> None:
    assert length([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (1.2, 1.3)]) == pytest.approx(3.5)
    assert length([]) == 0.0


def test_exposed_is_what_no_other_kernel_hides() -> None:
    found = account(
        [
            ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1.0, 3.0),
            ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5.0, 6.0),
            ("nvjet_tst_128x256", 2.0, 4.0),
            ("elementwise", 2.5, 3.5),
            ("nccl:_all_gather_base", 0.5, 6.5),  # the range of the call, not a kernel
            ("Memcpy HtoD (Pinned -> Device)", 5.0, 7.0),
        ]
    )
    assert found.wall == pytest.approx(6.5)
    assert found.busy == pytest.approx(2.0)
    assert found.collectives == pytest.approx(3.0)
    assert found.exposed == pytest.approx(2.0)
    assert found.by_name == {"ncclDevKernel_AllGather_RING_LL": pytest.approx(3.0)}
    assert found.to_dict()["exposed_share"] == pytest.approx(2 / 6.5)


def test_an_empty_profile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="recorded nothing on the GPU"):
        account([])
