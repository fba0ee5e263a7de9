"""Real processes over gloo or NCCL that run one function after another; a hang or a failure ends them all."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, world: int, port: int, device: str, calls: Any, results: Any) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": device,
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        # Convolutions are rounded to TensorFloat-32 by default, which float32 tolerances do not allow for.
        torch.backends.cudnn.allow_tf32 = False
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    while (call := calls.get()) is not None:
        function, args, kwargs = call
        try:
            results.put((rank, True, function(rank, world, *args, **kwargs)))
        except BaseException:  # noqa: BLE001 (the caller is told)
            results.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """`world` processes in one group: over gloo on CPUs, over NCCL on a CUDA device each.

    Started at the first call, and again after a failure.
    """

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world, self.device = world, device
        self._processes: list[Any] = []
        self._calls: list[Any] = []
        self._results: Any = None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self._results = context.Queue()
        self._calls = [context.Queue() for _ in range(self.world)]
        self._processes = [
            context.Process(target=_work, args=(rank, self.world, port, self.device, calls, self._results), daemon=True)
            for rank, calls in enumerate(self._calls)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call `function(rank, world, ...)` on every rank. Returns the results by rank.

        Raises AssertionError with all tracebacks if some rank raised, or has not answered in time.
        """
        if not self._processes:
            self._start()
            timeout += 60
        for calls in self._calls:
            calls.put((function, args, kwargs))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(errors) < self.world:
            # One rank's error leaves the others waiting in a collective: do not wait as long for them.
            limit = min(deadline, time.monotonic() + 10) if errors else deadline
            try:
                rank, fine, value = self._results.get(timeout=max(limit - time.monotonic(), 0.01))
            except Exception:  # noqa: BLE001 (queue.Empty of another module)
                break
            (answers if fine else errors)[rank] = value
        if len(answers) < self.world:
            silent = [r for r in range(self.world) if r not in answers and r not in errors]
            self.stop()
            text = "\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items()))
            raise AssertionError(f"no answer from ranks {silent} within {timeout} s\n{text}")
        return [answers[rank] for rank in range(self.world)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
        self._processes = []
