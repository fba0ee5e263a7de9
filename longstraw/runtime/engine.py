"""What the transactions of one model share: adapter, pages, weights watch, sizes that memory has taught."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longstraw.config import AUTO, Config
from longstraw.errors import TransactionStateError
from longstraw.pagers.staging import StagingPool
from longstraw.resident.store import PageStore
from longstraw.runtime.adapter import ModelAdapter, ModelProfile
from longstraw.runtime.ledger import GradientSums
from longstraw.runtime.memory import free_device_bytes
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.sizing import GraphSize, size_chunk, size_lane
from longstraw.runtime.tiers import build_store
from longstraw.runtime.transaction import Transaction
from longstraw.runtime.weights import WeightsWatch

_BLOCK_TOKENS = {"cuda": 65_536, "cpu": 8_192}

Progress = Callable[[str, Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]
"""Wraps the chunks of a phase ("capture", "sweep"), to show how far it is."""


class Engine:
    """Runs transactions on one model. `Runtime` is its public face.

    Args:
        adapter: the model.
        config: the settings.
        store: pages to share with another engine, or None for tiers of its own, made from `config.tiers`.
        progress: told of the chunks of long phases.
    """

    def __init__(
        self, adapter: ModelAdapter, config: Config, store: PageStore | None = None, progress: Progress | None = None
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.device = adapter.device
        self.watch = WeightsWatch(adapter)
        self.store = store if store is not None else build_store(config, self.device)
        self.staging = StagingPool(self.device)
        self.progress: Progress = progress if progress is not None else lambda phase, chunks: chunks
        self._free_bytes: int | None = None
        self._lane_limit: int | None = None
        self._chunk_limit: int | None = None
        self._sums: GradientSums | None = None

    # For the user's face

    def transaction(self, prompt_ids: Tensor, row_tokens: int | None, *, score_only: bool = False) -> Transaction:
        """A transaction on one prompt. `score_only` holds no gradient pages, whatever the config says."""
        return Transaction(
            self, prompt_ids, row_tokens, exact=not score_only and self.config.gradient.prompt == "exact"
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold the gradients of the transactions within, and add them to `.grad` together at the end."""
        if self._sums is not None:
            raise TransactionStateError("accumulate: already inside accumulate(); one block is one optimizer step")
        self._sums = GradientSums()
        try:
            yield
            self._sums.finalize()
        finally:
            self._sums = None

    def close(self) -> None:
        """Give every tier back."""
        for pager in self.store.pagers:
            pager.close()

    # For transactions

    def reserve(
        self, owner: str, profile: ModelProfile, chunks: Sequence[tuple[int, int]], *, exact: bool
    ) -> PromptState:
        """Pages for a prompt that will be captured in these chunks."""
        config = self.config
        block = config.pages.block_tokens
        if block == AUTO:
            page = config.pages.tokens
            block = max(_BLOCK_TOKENS[self.device.type] // page, 1) * page
        return PromptState(
            self.store,
            owner,
            profile.layers,
            chunks=chunks,
            exact=exact,
            accumulate_wide=config.gradient.accumulate == "float32",
            block_tokens=block,
            lookahead=config.pages.lookahead,
            staging=self.staging,
        )

    def release(self, owner: str) -> None:
        """Free every page of `owner`, whatever state it is in."""
        self.store.release(owner, force=True)

    def deliver(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """A finished transaction's gradients: into `.grad`, or to the surrounding `accumulate()`."""
        if self._sums is not None:
            self._sums.add(sums)
            return
        whole = GradientSums()
        whole.add(sums)
        whole.finalize()

    def lane_size(self, profile: ModelProfile, lengths: Sequence[int]) -> GraphSize:
        """Lane width and checkpointing for branches of these lengths."""
        replay = self.config.replay
        size = size_lane(
            profile,
            lengths,
            free=self._planning_bytes(),
            device=self.device,
            lane_tokens=replay.lane_tokens,
            checkpoint=replay.checkpoint,
            logit_block_tokens=replay.logit_block_tokens,
        )
        if self._lane_limit is not None and self._lane_limit < size.tokens:
            return GraphSize(tokens=self._lane_limit, checkpoint=size.checkpoint)
        return size

    def chunk_size(self, profile: ModelProfile, rows: int) -> GraphSize:
        """Prompt tokens a chunk, and checkpointing in the sweep."""
        size = size_chunk(
            profile,
            rows,
            free=self._planning_bytes(),
            device=self.device,
            chunk_tokens=self.config.capture.chunk_tokens,
            checkpoint=self.config.replay.checkpoint,
        )
        if self._chunk_limit is not None and self._chunk_limit < size.tokens:
            return GraphSize(tokens=self._chunk_limit, checkpoint=size.checkpoint)
        return size

    def limit_lanes(self, tokens: int) -> None:
        """Memory ran out on a lane: keep to this width from now on."""
        self._lane_limit = tokens if self._lane_limit is None else min(tokens, self._lane_limit)

    def limit_chunks(self, tokens: int) -> None:
        """Memory ran out on a chunk: keep to this length from now on."""
        self._chunk_limit = tokens if self._chunk_limit is None else min(tokens, self._chunk_limit)

    def _planning_bytes(self) -> int:
        # Sizes must not change between scoring and replay, or the two would round differently: what is free is read
        # once, before the first graph is built, and out-of-memory retries correct it downwards.
        if self._free_bytes is None:
            self._free_bytes = free_device_bytes(self.device)
        return self._free_bytes

    def begin_peak(self) -> None:
        """Start measuring the peak of device memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Most bytes that torch had allocated on the device since `begin_peak`; 0 on a CPU, which does not count."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
