"""The ranks that train one model together: short messages between them on the CPU, and a board for failures."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_WIDTH = 4
"""Whole numbers in a message."""


class Ranks:
    """A gloo group beside the one that carries tensors, so that messages never queue behind a reduction.

    Made on every member at the same time.

    Args:
        members: global ranks, ascending.
        timeout: how long a message may wait for the slowest rank (one may be sampling), or None for gloo's default.
    """

    def __init__(self, members: Sequence[int], timeout: timedelta | None = None) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(dist.get_rank())
        part = len(members) < dist.get_world_size()
        self._group = dist.new_group(
            list(members), backend="gloo", timeout=timeout, use_local_synchronization=part
        )
        self._board = self._open_board()

    @property
    def size(self) -> int:
        return len(self.members)

    def exchange(self, *message: int) -> list[tuple[int, ...]]:
        """Every rank's message, by rank. All ranks call it, each with at most four whole numbers."""
        assert len(message) <= _WIDTH
        mine = torch.tensor([*message, *[0] * (_WIDTH - len(message))], dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in self.members]
        dist.all_gather(told, mine, group=self._group)
        return [tuple(int(number) for number in one) for one in told]

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. All ranks call it."""
        told: list[str] = [""] * self.size
        dist.all_gather_object(told, text, group=self._group)
        return told

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank. All ranks call it, with equally many."""
        if not flags:
            return []
        marks = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(mark) for mark in marks]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sums over all ranks. All ranks call it, with equally many numbers."""
        sums = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        return [int(number) for number in sums]

    def post(self, notice: str, text: str) -> None:
        """Pin a notice that the other ranks see without being waited for."""
        self._board.set(notice, f"{self.rank} {text}")

    def posted(self, notice: str) -> tuple[int, str] | None:
        """The rank that pinned `notice` and its text, or None. Does not wait."""
        if not self._board.check([notice]):
            return None
        rank, _, text = self._board.get(notice).decode().partition(" ")
        return int(rank), text

    def _open_board(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "") if self.members[0] == 0 else ""
        host = host or socket.gethostname()
        board, port = None, 0
        if self.rank == 0:
            board = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = board.port
        address = self.exchange_text(f"{host} {port}")[0]
        if board is None:
            host, _, text = address.partition(" ")
            board = TCPStore(host, int(text), is_master=False, wait_for_workers=False)
        return board
