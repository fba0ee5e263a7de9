"""The ranks that train one model together: short messages between them on the CPU, and a board for failures."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_WIDTH = 4
"""Whole numbers in a message."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Line:
    """What messages go over. Five file descriptors and three threads, so it is used again when its user is done.

    A group is not destroyed instead: torch may give the next one its name, and with it what is left under that name
    in the rendezvous.
    """

    world: dist.ProcessGroup | None
    members: tuple[int, ...]
    timeout: timedelta | None
    group: dist.ProcessGroup
    board: TCPStore
    uses: int = 0


_IDLE: list[_Line] = []
"""Lines that were given back. On every rank in the same order, as they are taken and given back together."""


class Ranks:
    """A gloo group beside the one that carries tensors, so that messages never queue behind a reduction.

    Made, and closed, on every member in the same order.

    Args:
        members: global ranks, ascending.
        timeout: how long a message may wait for the slowest rank (one may be sampling), or None for gloo's default.
    """

    def __init__(self, members: Sequence[int], timeout: timedelta | None = None) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(dist.get_rank())
        self._line: _Line | None = self._take_idle(timeout) or self._open(timeout)
        self._line.uses += 1
        # What an earlier user of the line pinned to the board is not for this one.
        self._prefix = f"{self._line.uses}:"

    @property
    def size(self) -> int:
        return len(self.members)

    def exchange(self, *message: int) -> list[tuple[int, ...]]:
        """Every rank's message, by rank. All ranks call it, each with at most four whole numbers."""
        assert len(message) <= _WIDTH
        mine = torch.tensor([*message, *[0] * (_WIDTH - len(message))], dtype=torch.int64, device="cpu")
        told = [torch.empty_like(mine) for _ in self.members]
        dist.all_gather(told, mine, group=self._open_line.group)
        return [tuple(int(number) for number in one) for one in told]

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. All ranks call it."""
        told: list[str] = [""] * self.size
        dist.all_gather_object(told, text, group=self._open_line.group)
        return told

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank. All ranks call it, with equally many."""
        if not flags:
            return []
        marks = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._open_line.group)
        return [bool(mark) for mark in marks]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sums over all ranks. All ranks call it, with equally many numbers."""
        sums = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(sums, group=self._open_line.group)
        return [int(number) for number in sums]

    def post(self, notice: str, text: str) -> None:
        """Pin a notice that the other ranks see without being waited for."""
        self._open_line.board.set(self._prefix + notice, f"{self.rank} {text}")

    def posted(self, notice: str) -> tuple[int, str] | None:
        """The rank that pinned `notice` and its text, or None. Does not wait."""
        board, key = self._open_line.board, self._prefix + notice
        if not board.check([key]):
            return None
        rank, _, text = board.get(key).decode().partition(" ")
        return int(rank), text

    def close(self) -> None:
        """Give the group back for the next `Ranks` of the same members. No message may be on its way. Idempotent."""
        if self._line is not None:
            _IDLE.append(self._line)
            self._line = None

    @property
    def _open_line(self) -> _Line:
        assert self._line is not None, "these ranks were closed"
        return self._line

    def _take_idle(self, timeout: timedelta | None) -> _Line | None:
        # A group does not outlive the world that it was made in.
        _IDLE[:] = [line for line in _IDLE if line.world is dist.group.WORLD]
        for line in _IDLE:
            if (line.members, line.timeout) == (self.members, timeout):
                _IDLE.remove(line)
                return line
        return None

    def _open(self, timeout: timedelta | None) -> _Line:
        part = len(self.members) < dist.get_world_size()
        group = dist.new_group(list(self.members), backend="gloo", timeout=timeout, use_local_synchronization=part)
        return _Line(
            world=dist.group.WORLD, members=self.members, timeout=timeout, group=group, board=self._open_board(group)
        )

    def _open_board(self, group: dist.ProcessGroup) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "") if self.members[0] == 0 else ""
        host = host or socket.gethostname()
        board, port = None, 0
        if self.rank == 0:
            board = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = board.port
        told = [""] * self.size
        dist.all_gather_object(told, f"{host} {port}", group=group)
        if board is None:
            host, _, text = told[0].partition(" ")
            board = TCPStore(host, int(text), is_master=False, wait_for_workers=False)
        # The board goes with rank 0's: were that to fail at once, a rank still on its way here would try for minutes.
        dist.barrier(group=group)
        return board
