"""The extent allocator, against a map of every unit."""

from __future__ import annotations

import random

import pytest

from longstraw.pagers.extents import ExtentAllocator
from longstraw.resident.placement import EXTENT_ALIGNMENT as UNIT


@pytest.mark.parametrize("seed", range(10))
def test_random_use_never_overlaps_and_merges_all(seed: int) -> None:
    rng = random.Random(seed)
    extents = ExtentAllocator()
    regions = [(extents.add_region(size * UNIT), size * UNIT) for size in (16, 3, 40)]
    held: dict[int, int] = {}
    for _ in range(400):
        if held and rng.random() < 0.5:
            start = rng.choice(list(held))
            extents.free(start, held.pop(start))
        else:
            nbytes = rng.randrange(1, 12) * UNIT
            largest = extents.largest_free()
            start = extents.allocate(nbytes)
            assert (start is None) == (nbytes > largest)
            if start is not None:
                assert any(low <= start and start + nbytes <= low + size for low, size in regions)
                assert all(start + nbytes <= s or s + n <= start for s, n in held.items())
                held[start] = nbytes
        assert extents.used == sum(held.values())
    for start, nbytes in held.items():
        extents.free(start, nbytes)
    assert extents.largest_free() == 40 * UNIT
    assert extents.capacity == 59 * UNIT


def test_extend_merges_with_the_free_end() -> None:
    extents = ExtentAllocator()
    extents.extend(2 * UNIT)
    first = extents.allocate(UNIT)
    extents.extend(3 * UNIT)
    assert extents.largest_free() == 4 * UNIT
    assert (first, extents.allocate(4 * UNIT)) == (0, UNIT)


def test_a_region_goes_only_when_it_is_free() -> None:
    extents = ExtentAllocator()
    start = extents.add_region(2 * UNIT)
    held = extents.allocate(UNIT)
    assert held is not None
    assert not extents.drop_region(start, 2 * UNIT)
    extents.free(held, UNIT)
    assert extents.drop_region(start, 2 * UNIT)
    assert (extents.capacity, extents.largest_free()) == (0, 0)


def test_double_free_asserts() -> None:
    extents = ExtentAllocator()
    extents.add_region(4 * UNIT)
    held = extents.allocate(2 * UNIT)
    assert held is not None
    extents.free(held, 2 * UNIT)
    with pytest.raises(AssertionError, match="free already"):
        extents.free(held, 2 * UNIT)


def test_the_hole_around_a_freed_range() -> None:
    extents = ExtentAllocator()
    extents.add_region(6 * UNIT)
    held = [extents.allocate(UNIT) for _ in range(5)]
    extents.free(held[1] or 0, UNIT)
    assert extents.hole_at(held[1] or 0) == (UNIT, 2 * UNIT)
    extents.free(held[2] or 0, UNIT)
    assert extents.hole_at(held[2] or 0) == extents.hole_at(held[1] or 0) == (UNIT, 3 * UNIT)
    extents.free(held[4] or 0, UNIT)
    assert extents.hole_at(held[4] or 0) == (4 * UNIT, 6 * UNIT)
