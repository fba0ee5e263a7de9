"""Pools of two and of four processes on CPUs, and of two on a GPU each, shared by all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        for item in items:
            if "zero" in item.nodeid and "distributed" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs deepspeed: pip install 'longstraw[deepspeed]'"))


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


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    pool = Pool(2, "cuda")
    yield pool
    pool.stop()
