"""A pass that computes nothing that counts: what a rank runs while another has more work than it."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

import torch

from longstraw.runtime.lockstep import Kind
from longstraw.runtime.passes import ForwardPass, HeadRequest, Purpose
from longstraw.runtime.routers import RouterTally

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine

_LEARNING = {Kind.REPLAY: Purpose.REPLAY, Kind.SWEEP: Purpose.SWEEP}
_PROBE_PASSES = 2


def run_empty_pass(engine: Engine, kind: Kind, checkpoint: bool) -> None:
    """One token through the model, on a prompt of which nothing was captured, with a gradient of zero.

    It calls the same layers in the same order as a real pass of its kind, so that the framework's collectives line up
    with those of the ranks that have work.
    """
    with ExitStack() as stack:
        if kind in (Kind.PROBE, Kind.REFERENCE):
            stack.enter_context(engine.adapter.reference())
        for number in range(_PROBE_PASSES if kind is Kind.PROBE else 1):
            # The two runs of a probe are one pass to the other ranks.
            _run(engine, kind, checkpoint, agreed=number == 0)


def _run(engine: Engine, kind: Kind, checkpoint: bool, *, agreed: bool) -> None:
    adapter, replay = engine.adapter, engine.config.replay
    ids = torch.zeros(1, dtype=torch.int64, device=engine.device)
    head = None
    if kind is Kind.REPLAY:
        head = HeadRequest(
            targets_S=ids,
            temperature=replay.temperature,
            block_tokens=replay.logit_block_tokens,
            entropy=replay.entropy,
        )
    purpose = _LEARNING.get(kind, Purpose.PROBE)
    # A prompt of no tokens: there is nothing to read, and no gradient arrives.
    state = engine.reserve("empty-pass", adapter.profile(), (), exact=False) if kind in _LEARNING else None
    # The last layer runs as in real passes.
    routed = kind in _LEARNING and adapter.profile().no_aux_loss is None
    routers = RouterTally([1], counting=False) if routed else None
    forward = ForwardPass(purpose, [1], state=state, head=head, checkpoint=checkpoint, routers=routers)
    with torch.set_grad_enabled(kind in _LEARNING), forward, adapter.active(forward):
        with engine.lockstep.half() if agreed else nullcontext():
            out = adapter.run(forward, ids, ids)
        if kind in _LEARNING:
            with engine.lockstep.half(), engine.empty_ledger():
                if out.requires_grad:
                    engine.sharding.backward(out, torch.zeros_like(out))
