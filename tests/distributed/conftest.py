"""Pools of two and of four processes, shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.stop()
