"""What a step sends between ranks: counted by the report as it really runs, and no more of it than there must be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from longstraw import Config, Runtime
from longstraw.collectives import GATHER, REDUCE, SCATTER, CollectiveMeter, Tally
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Framework, Machine, Plan, ShardingChoice, Workload, make_plan
from tests.distributed.pool import Pool
from tests.distributed.steps import Held, build_kind
from tests.distributed.test_sums import NARROW
from tests.distributed.wraps import ddp, fsdp2, fsdp2_hybrid, zero
from tests.parity.models import SMALL, add_lora, make_group, replay_group

LAYERS, CHUNKS, LANES = 3, 3, 3
EACH_PASS = {"gradient": {"reduce": "each_pass"}}
CUT = {"capture": {"chunk_tokens": 23}, "replay": {"lane_tokens": 7, "checkpoint": False}}
CHECKPOINTED = {"capture": {"chunk_tokens": 23}, "replay": {"lane_tokens": 7, "checkpoint": True}}


def prefetching(model: Any) -> Held:
    """Units that ask for the next one's weights ahead of time, by FSDP2's own calls."""
    held = fsdp2(model)
    layers = list(model.model.layers)
    for one, following in itertools.pairwise(layers):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return held


def a_step(
    rank: int, world: int, wrap: Any, config: dict[str, Any], lora: bool = False, score: bool = True, **options: Any
) -> dict[str, Any]:
    """What the second step sent: by the report, and seen by a meter around all of it."""
    model = build_kind("qwen3", num_hidden_layers=LAYERS)
    if lora:
        model = add_lora(model)
    sizes = {"whole": 0, "trained": 0}
    for parameter in model.parameters():
        sizes["whole"] += parameter.nbytes
        sizes["trained"] += parameter.nbytes if parameter.requires_grad else 0
    held = wrap(model, **options)
    runtime, group = Runtime(held.model, SMALL | config), make_group(61, (7, 7, 7))
    for _ in range(2):
        seen = Tally()
        txn = runtime.transaction(group.prompt)
        with CollectiveMeter(seen), Unheard(seen, runtime), runtime.accumulate(), txn:
            if score:
                txn.score(group.responses)
            replay_group(txn, group)
        held.step()
    report = txn.report
    assert (report.chunks, report.lanes) == (CHUNKS, LANES)
    units = sum(isinstance(module, FSDPModule) for module in held.model.modules())
    return {
        "report": (report.collectives, report.collective_bytes), "seen": (seen.counts, seen.bytes),
        "units": units, "text": str(report), **sizes,
    }  # fmt: skip


class Unheard:
    """Messages between ranks carry no tensors of the model's: a meter is not to see them."""

    def __init__(self, seen: Tally, runtime: Runtime) -> None:
        self._seen, self._ranks = seen, runtime._engine.sharding.ranks

    def __enter__(self) -> None:
        assert self._ranks is not None
        kind = type(self._ranks)
        self._kept = {name: getattr(kind, name) for name in ("exchange", "any_of")}
        for name, call in self._kept.items():
            setattr(kind, name, self._wrap(call))

    def _wrap(self, call: Any) -> Any:
        def unheard(*args: Any) -> Any:
            before = self._seen.copy()
            found = call(*args)
            self._seen.counts, self._seen.bytes = before.counts, before.bytes
            return found

        return unheard

    def __exit__(self, *_: Any) -> None:
        for name, call in self._kept.items():
            setattr(type(self._ranks), name, call)


FSDP2_CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "resharded": (fsdp2, CUT, {}),
    "kept": (fsdp2, CUT, {"reshard": False}),
    "each pass, kept": (fsdp2, CUT | EACH_PASS, {"reshard": False}),
    "checkpointed": (fsdp2, CHECKPOINTED, {}),
    "checkpointed, each pass": (fsdp2, CHECKPOINTED | EACH_PASS, {}),
    "unit in a unit": (fsdp2, CUT | EACH_PASS, {"nested": True, "head": True}),
    "prefetched": (prefetching, CUT, {}),
    "LoRA": (fsdp2, CUT | EACH_PASS, {"lora": True}),
    "narrow": (fsdp2, CUT | EACH_PASS, {"policy": NARROW}),
}


@pytest.mark.parametrize("case", FSDP2_CASES)
def test_fsdp2s_collectives_are_counted_as_they_run(two: Pool, case: str) -> None:
    wrap, config, options = FSDP2_CASES[case]
    for found in two.run(a_step, wrap, config, **options):
        assert found["report"] == found["seen"], case


def test_replicas_of_shards(four: Pool) -> None:
    for config in (CUT, CUT | EACH_PASS):
        for found in four.run(a_step, fsdp2_hybrid, config):
            assert found["report"] == found["seen"]
            assert found["report"][0][REDUCE] > 0


FORWARDS, BACKWARDS = 2 * CHUNKS + 2 * LANES, LANES + CHUNKS
"""Captures, scores, replays and the sweep; of which the last two go back as well."""


def test_a_units_weights_are_gathered_once_a_forward_and_once_a_backward(two: Pool) -> None:
    for wrap, config in ((fsdp2, CUT), (fsdp2, CHECKPOINTED), (prefetching, CUT)):
        for found in two.run(a_step, wrap, config):
            assert found["seen"][0][GATHER] == found["units"] * (FORWARDS + BACKWARDS)


def test_kept_weights_are_gathered_once_for_all_captures_and_scores_and_once_a_pass_with_a_backward(two: Pool) -> None:
    for found in two.run(a_step, fsdp2, CUT, reshard=False):
        assert found["seen"][0][GATHER] == found["units"] * BACKWARDS


def test_what_each_way_of_reducing_costs(two: Pool) -> None:
    """Deferred: every gradient once, in float32. In each pass: one collective a unit and backward."""
    (deferred, _), (each, _) = (two.run(a_step, fsdp2, CUT | config, policy=NARROW) for config in ({}, EACH_PASS))
    assert deferred["seen"][1][SCATTER] == pytest.approx(deferred["trained"], rel=0.01)
    assert each["seen"][0][SCATTER] == each["units"] * BACKWARDS
    # Half the bytes a time, and no gradient of the head (of 16k values) in the sweep.
    assert each["seen"][1][SCATTER] > 0.4 * BACKWARDS * each["trained"]
    assert "between ranks (FSDP2, each_pass): " in each["text"]


def test_ddp_reduces_once(two: Pool) -> None:
    for found in two.run(a_step, ddp, CUT):
        assert found["report"] == found["seen"] == ({REDUCE: 1}, {REDUCE: found["trained"]})


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_reduces_once(two: Pool, stage: int) -> None:
    for found in two.run(a_step, zero, CUT, stage=stage):
        assert found["report"] == found["seen"]
        assert sum(found["seen"][1].values()) == found["trained"]


def test_zero_3_gathers_are_counted_by_weight(two: Pool) -> None:
    """DeepSpeed merges collectives as it likes; the bytes are the same."""
    for found in two.run(a_step, zero, CUT, stage=3):
        assert found["report"][1] == found["seen"][1]
        # And once more to hand gradients over.
        assert found["seen"][1][GATHER] <= (FORWARDS + BACKWARDS + 1) * found["whole"]


def planned(choice: ShardingChoice, config: dict[str, Any]) -> Plan:
    """The plan of `a_step` without its scores."""
    found = blueprint(build_kind("qwen3", num_hidden_layers=LAYERS).config, dtype=torch.float32)
    settings = Config(**(SMALL | config))
    return make_plan(found, Workload(prompt=61, group=3, response=7), settings, Machine(), sharding=choice)


@pytest.mark.parametrize(
    ("wrap", "config", "options", "choice"),
    [
        (fsdp2, CUT, {}, {"framework": Framework.FSDP2}),
        (fsdp2, CUT | EACH_PASS, {}, {"framework": Framework.FSDP2}),
        (fsdp2, CUT, {"reshard": False}, {"framework": Framework.FSDP2, "reshard": False}),
        (ddp, CUT, {}, {"framework": Framework.DDP}),
        (zero, CUT, {"stage": 2}, {"framework": Framework.ZERO2}),
        (zero, CUT, {"stage": 3}, {"framework": Framework.ZERO3}),
    ],
)
def test_a_step_sends_what_the_plan_says(
    two: Pool, wrap: Any, config: dict[str, Any], options: dict[str, Any], choice: dict[str, Any]
) -> None:
    plan = planned(ShardingChoice(replicas=2, **choice), config)
    counts, sizes = Tally(), Tally()
    for phase in plan.phases.values():
        for kind, count in phase.collectives.items():
            counts.add(kind, 0, count)
            sizes.add(kind, phase.collective_bytes[kind])
    for found in two.run(a_step, wrap, config, score=False, **options):
        assert found["report"][0] == counts.counts
        # The plan knows nothing of shards that are made equally long, and of what the last layer computes in vain in a
        # sweep, which has no gradient.
        assert found["report"][1] == pytest.approx(sizes.bytes, rel=0.02)
