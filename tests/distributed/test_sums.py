"""Many passes are one gradient; means over all ranks' tokens; no bit is lost in bfloat16."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from longstraw import Runtime
from longstraw.integrations.fsdp2 import Fsdp2Sharding
from longstraw.objectives import Aggregation, GroupSize, aggregate, gspo_loss, size_over_ranks
from longstraw.runtime.ledger import GradientLedger
from tests.distributed.pool import Pool
from tests.distributed.steps import UNEQUAL, build_kind, compare_training, groups_of, plain_training, relative
from tests.distributed.wraps import ddp, fsdp2, zero
from tests.parity.models import SMALL, lane_loss, plain_logprobs

EACH_PASS = {"gradient": {"reduce": "each_pass"}}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
SIXTY_FOUR = ([(20, [2] * 64)], [(31, [2] * 64)])


@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize(
    ("wrap", "config", "options"),
    [
        (ddp, {}, {}),
        (fsdp2, {}, {}),
        (fsdp2, EACH_PASS, {}),
        *[(zero, {}, {"stage": stage}) for stage in (1, 2, 3)],
    ],
    ids=["ddp", "fsdp2", "fsdp2-each_pass", "zero-1", "zero-2", "zero-3"],
)
def test_passes_add_up(two: Pool, wrap: Any, config: dict[str, Any], options: dict[str, Any], lanes: int) -> None:
    config = config | {"replay": {"lane_tokens": 128 // lanes}, "capture": {"chunk_tokens": 64}}
    for errors in two.run(compare_training, wrap, shapes=SIXTY_FOUR, steps=1, config=config, **options):
        assert errors["gradient"] <= 1e-5, errors


def ones(rank: int, world: int, reduce: str, wide: bool) -> float:
    """257 backward passes, each with a gradient of 1, through weights that are gathered in bfloat16."""
    layer = nn.Linear(4, 4, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), mp_policy=NARROW)
    sharding = Fsdp2Sharding(layer, reduce=reduce, wide=wide)
    ledger = GradientLedger(wide=wide, hooked=sharding.takes_gradients)
    ledger.begin(sharding.leaves())
    for _ in range(257):
        layer(torch.ones(1, 4)).sum().backward()
    sharding.finalize(ledger.take())
    gradient = layer.weight.grad.full_tensor()  # type: ignore[union-attr]
    assert bool((gradient == gradient[0, 0]).all())
    return float(gradient[0, 0])


@pytest.mark.parametrize("reduce", ["deferred", "each_pass"])
def test_257_ones_are_257(two: Pool, reduce: str) -> None:
    assert two.run(ones, reduce, True) == [257.0, 257.0]


def test_without_wide_sums_bits_are_lost(two: Pool) -> None:
    """What the guard is for: bfloat16 has no 257, and stops counting at 256."""
    assert two.run(ones, "deferred", False) == [256.0, 256.0]


@pytest.mark.parametrize("config", [{}, EACH_PASS])
def test_mixed_precision(two: Pool, config: dict[str, Any]) -> None:
    """Log-probs leave the model in float32 although FSDP2 casts its outputs, and score and replay agree in all bits."""
    for errors in two.run(compare_training, fsdp2, config=config, policy=NARROW):
        assert errors["gradient"] < 0.2, errors
        assert errors["weights"] < 0.02, errors


def narrow_logprobs(rank: int, world: int) -> bool:
    held = fsdp2(build_kind("qwen3"), policy=NARROW)
    group = groups_of(UNEQUAL, 0)[0][0]
    with Runtime(held.model, SMALL).transaction(group.prompt) as txn:
        found = torch.cat(txn.score(group.responses))
    return found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())


def test_logprobs_are_not_rounded_on_their_way_out(two: Pool) -> None:
    assert two.run(narrow_logprobs) == [True, True]


def scaled_losses(rank: int, world: int, wrap: Any, config: dict[str, Any], by_hand: bool) -> tuple[float, float]:
    """How far gradients are from those of the ordinary step: as they arrive, and behind the scaler's `unscale_`."""
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    held = wrap(model)
    # A CPU has no float16 to scale losses for: the scaler is a real one, the rest of the accelerator is not.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = SimpleNamespace(
        distributed_type="NO", num_processes=world, scaler=scaler, gradient_accumulation_steps=1, mixed_precision="fp16"
    )
    runtime = Runtime(held.model, SMALL | config, accelerator=None if by_hand else accelerator)
    with runtime.accumulate():
        for group in groups_of(UNEQUAL, 0)[rank]:
            with runtime.transaction(group.prompt) as txn:
                for lane in txn.replay(group.responses):
                    loss = lane_loss(group, lane)
                    lane.backward(scaler.scale(loss) if by_hand else loss)
    want, _ = plain_training(reference, UNEQUAL, 1)
    scaled = max(relative(held.gradients(), {n: 1024 * g for n, g in want.items()}).values())
    scaler.unscale_(held.optimizer)
    return scaled, max(relative(held.gradients(), want).values())


@pytest.mark.parametrize("by_hand", [False, True], ids=["accelerator", "own scaler"])
@pytest.mark.parametrize(("wrap", "config"), [(ddp, {}), (fsdp2, {}), (fsdp2, EACH_PASS)])
def test_losses_that_are_scaled(two: Pool, wrap: Any, config: dict[str, Any], by_hand: bool) -> None:
    for scaled, unscaled in two.run(scaled_losses, wrap, config, by_hand):
        assert scaled <= 1e-5
        assert unscaled <= 1e-5


def token_mean(rank: int, world: int, sequences: bool) -> float:
    """A mean over all tokens (or sequences) of both ranks."""
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    held = ddp(model)
    runtime = Runtime(held.model, SMALL)
    mine = groups_of(UNEQUAL, 0)
    size = size_over_ranks([GroupSize.of(group.responses) for group in mine[rank]])

    def loss(logprobs: list[Tensor], size: GroupSize) -> Tensor:
        if sequences:
            olds = [x.detach() for x in logprobs]
            return gspo_loss(logprobs, olds, torch.ones(len(logprobs)), size=size).loss
        return aggregate([x * x for x in logprobs], size=size, how=Aggregation.TOKEN_MEAN)

    with runtime.accumulate():
        for group in mine[rank]:
            with runtime.transaction(group.prompt) as txn:
                for lane in txn.replay(group.responses):
                    lane.backward(loss(lane.logprobs, size))
    rows = [plain_logprobs(reference, g.prompt, r)[0] for groups in mine for g in groups for r in g.responses]
    loss(rows, GroupSize.of(rows)).backward()
    return max(relative(held.gradients(), {n: p.grad for n, p in reference.named_parameters()}).values())


@pytest.mark.parametrize("sequences", [False, True])
def test_means_over_all_ranks(two: Pool, sequences: bool) -> None:
    assert max(two.run(token_mean, sequences)) <= 1e-5
