"""ZeRO-3's order of modules, by which it gathers ahead: recorded with a backward, and what it keeps between passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.runtime.ledger import GradientLedger


class ZeroOrder:
    """Has DeepSpeed record an order with a backward, and lets go of what that order keeps across passes.

    DeepSpeed records the modules of the first pass that it sees, until the next one begins. By this order it gathers
    weights ahead, and keeps those that come again within its reuse distance. Passes without a backward follow the
    beginning of an order that has one. Were they the first, as captures are, the order would be thrown away in the
    first backward; and 0.19.8 remembers for good what it released by it (a cache on `__params_to_release`), so that
    what it could keep for a backward would go behind each forward, and be gathered again one by one.

    Args:
        engine: of ZeRO-3.
        parameters: of the whole model.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter]) -> None:
        import deepspeed
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        self._engine = engine
        self._parameters: list[Any] = list(parameters)
        self._gathered = deepspeed.zero.GatheredParameters
        # An engine for inference has no backward.
        self._recorded = not isinstance(engine.optimizer, ZeROOptimizer)
        self._fits = sum(p.ds_numel for p in self._parameters) <= engine.zero_max_live_parameters()

    def __contains__(self, address: object) -> bool:
        """Whether a gathered weight lies in the storage at `address` just now."""
        return any(
            p.ds_status.name == "AVAILABLE" and p.untyped_storage().data_ptr() == address for p in self._parameters
        )

    @property
    def recorded(self) -> bool:
        """Whether a pass with a backward was run to be recorded, or nothing wants one."""
        return self._recorded

    def record(self, out: Tensor, leaves: Sequence[nn.Parameter], backward: Callable[[Tensor, Tensor], None]) -> None:
        """Run a backward of zeros from `out`, of which nothing stays: no gradient, and nothing that is reduced."""
        self._recorded = True
        ledger = GradientLedger(wide=False, hooked=True)
        try:
            with self._engine.coalesce_grad_reduction():
                try:
                    ledger.begin(leaves)
                    with ledger.discarding():
                        backward(out, torch.zeros_like(out))
                finally:
                    # Before the reduction that the end of this block is: it takes every gradient that it finds.
                    ledger.rollback()
        finally:
            self._engine.optimizer.zero_grad()

    def begin_pass(self) -> None:
        """DeepSpeed counts what it gathers from each pass's beginning: what the last one left would come on top of
        `stage3_max_live_parameters`. A model within that stays, and passes without a backward gather it once."""
        if not self._fits:
            self.let_go()

    def let_go(self) -> None:
        """Release what passes without a backward have kept for one. Weights that are written meanwhile, by a checkpoint
        or by hand, must not be found here as they were."""
        kept = [p for p in self._parameters if _is_kept(p)]
        # Gathers nothing: all of them are there.
        with self._gathered(kept, enabled=bool(kept)):
            pass


def _is_kept(parameter: Any) -> bool:
    return parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist and not parameter.ds_active_sub_modules
