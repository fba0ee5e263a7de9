"""ZeRO-3 gathers weights ahead of their use, no more often than it has to, and keeps none that could grow stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from longstraw import Runtime
from longstraw.collectives import GATHER, CollectiveMeter, Tally
from tests.distributed.pool import Pool
from tests.distributed.steps import KINDS, build_kind, compare_training
from tests.distributed.test_parity import check, check_kind
from tests.distributed.test_traffic import CHECKPOINTED, CUT, Unheard
from tests.distributed.wraps import zero
from tests.parity.models import SMALL, add_lora, make_group, replay_group

PASSES_BACK = 6
"""Lanes and chunks of a group under `CUT`."""


class Watch:
    """What of a model's weights is gathered, seen by hooks ahead of DeepSpeed's own.

    Attributes:
        on_demand: weights that were not even asked for when their module came to run, forward or backward.
        most: elements that were gathered, or on their way, at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.on_demand = self.most = 0
        self._all: list[Any] = list(model.parameters())
        for module in model.modules():
            weights = [p for p in module._parameters.values() if p is not None]
            # What is inside of a module that is gathered as one has no hooks of DeepSpeed's.
            if hasattr(module, "ds_id"):
                owned = list(module.parameters()) if getattr(module, "_z3_leaf", False) else weights
                module.register_forward_pre_hook(lambda *_, owned=owned: self._used(owned), prepend=True)
                module.register_forward_hook(lambda _m, _a, out, owned=owned: self._behind(out, owned))

    def _used(self, weights: list[Any]) -> None:
        self.on_demand += sum(p.ds_status.name == "NOT_AVAILABLE" for p in weights)
        self.most = max(self.most, sum(p.ds_numel for p in self._all if p.ds_status.name != "NOT_AVAILABLE"))

    def _behind(self, out: Any, weights: list[Any]) -> None:
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._used(weights))


def limits(model: Any, layers: float) -> dict[str, int]:
    """Settings under which ZeRO-3 holds that many layers' weights at most."""
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    return {
        "stage3_max_live_parameters": int(layers * layer),
        "stage3_max_reuse_distance": int(layers * layer),
        "stage3_prefetch_bucket_size": layer,
    }


def settled(
    rank: int,
    world: int,
    kind: str,
    configs: list[dict[str, Any]],
    layers: int = 0,
    held: float = 0,
    rehearsed: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """What a step costs once the order is known: of a runtime with each of `configs`, on one model."""
    model = build_kind(kind, **({"num_hidden_layers": layers} if layers else {}))
    whole = sum(p.nbytes for p in model.parameters())
    if held:
        options |= limits(model, held)
    wrapped = zero(model, stage=3, **options)
    runtimes = [Runtime(wrapped.model, SMALL | config) for config in configs]
    if not rehearsed:
        for runtime in runtimes:
            runtime._engine.sharding._order._recorded = True  # type: ignore[attr-defined]
    watch, group, found = Watch(wrapped.model.module), make_group(61, (7, 7, 7)), []  # type: ignore[arg-type]
    for step in range(2):
        for runtime in runtimes:
            # The order of a checkpointed pass is known after two of its passes at the latest.
            seen, watch.on_demand, watch.most = Tally(), 0, 0
            txn = runtime.transaction(group.prompt)
            with CollectiveMeter(seen), Unheard(seen, runtime), runtime.accumulate(), txn:
                txn.score(group.responses)
                replay_group(txn, group)
            wrapped.step()
            if step:
                most = watch.most / sum(p.ds_numel for p in wrapped.model.module.parameters())  # type: ignore[union-attr]
                report = txn.report
                handed_over = sum(1 for _ in wrapped.model.module.parameters())  # type: ignore[union-attr]
                assert report.chunks + report.lanes == PASSES_BACK
                found.append(
                    {"gathered": seen.bytes[GATHER] / whole, "calls": seen.counts[GATHER] - handed_over, "most": most}
                    | {"reported": report.collective_bytes[GATHER] / whole, "on_demand": watch.on_demand}
                )
    return found


@pytest.mark.parametrize("config", [CUT, CHECKPOINTED], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_fits_is_gathered_once_for_all_passes_up_to_the_first_backward_and_once_a_pass_then(
    two: Pool, kind: str, config: dict[str, Any]
) -> None:
    for (found,) in two.run(settled, kind, [config], timeout=120):
        # By the first capture, kept until the first lane's backward; by each later pass; and to hand gradients over.
        assert found["gathered"] == found["reported"] == PASSES_BACK + 1
        assert found["on_demand"] == 0


def test_without_a_first_backward_weights_are_gathered_twice_a_pass_and_one_by_one(two: Pool) -> None:
    """What DeepSpeed 0.19.8 does where it sees passes without a backward first, and why it does not here."""
    for (found,) in two.run(settled, "qwen3", [CUT], layers=3, rehearsed=False):
        assert found["gathered"] == 6 + 2 * PASSES_BACK + 1
        assert found["on_demand"] == 36 * PASSES_BACK


@pytest.mark.parametrize("config", [CUT, CHECKPOINTED], ids=["kept", "checkpointed"])
def test_a_larger_model_is_gathered_ahead_too_and_no_more_of_it_is_there_at_once_than_was_allowed(
    two: Pool, config: dict[str, Any]
) -> None:
    for (found,) in two.run(settled, "qwen3", [config], layers=12, held=4, timeout=120):
        assert found["on_demand"] == 0
        # 4 of 12.8 layers' worth are kept for a backward, and what computes comes on top.
        assert found["most"] <= 4.4 / 12.8
        forwards, backwards = 12, PASSES_BACK * (1 - 4 / 12.8)
        assert found["gathered"] == pytest.approx(forwards + backwards + 1, rel=0.01)
        assert found["reported"] == pytest.approx(found["gathered"], rel=0.01)


def test_layers_that_are_gathered_as_one_have_the_same_order_checkpointed_or_not(two: Pool) -> None:
    """And few collectives. Without, each change of `checkpoint` costs two passes whose weights come on demand."""
    for whole_layers in (True, False):
        for found in two.run(settled, "qwen3", [CUT, CHECKPOINTED], layers=6, whole_layers=whole_layers, timeout=120):
            for each in found:
                assert (each["on_demand"] == 0) is whole_layers
                assert (each["calls"] == PASSES_BACK) is whole_layers


@pytest.mark.parametrize("whole_layers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_where_little_is_held_at_once(two: Pool, kind: str, whole_layers: bool) -> None:
    options = limits(build_kind(kind), 1.5) | {"whole_layers": whole_layers}
    check_kind(two, zero, kind, stage=3, **options)


def lora_with_input_gradients(model: Any) -> Any:
    model = add_lora(model)
    model.enable_input_require_grads()
    return model


def test_lora_on_layers_that_are_gathered_as_one(two: Pool) -> None:
    check(two.run(compare_training, zero, prepare=lora_with_input_gradients, stage=3, whole_layers=True))


def own_backward(rank: int, world: int) -> float:
    """A gradient of the user's own is pending while the runtime runs its first passes: the step is the same."""
    model = build_kind("qwen3")
    twin = copy.deepcopy(model)
    ids = torch.arange(20)[None] + rank
    weights = []
    for each, scored in ((model, False), (twin, True)):
        held = zero(each, stage=3)
        held.model.backward(held.model(input_ids=ids, labels=ids).loss)  # type: ignore[operator]
        if scored:
            group = make_group(20, (3,))
            Runtime(held.model, SMALL).score(group.prompt, group.responses)
        held.step()
        weights.append(held.weights())
    before = build_kind("qwen3")
    moved = max(float((weights[0][n] - p).abs().max()) for n, p in before.named_parameters())
    assert moved > 1e-4
    return max(float((weights[0][n] - weights[1][n]).abs().max()) for n in weights[0])


def test_a_gradient_of_the_users_own_outlives_the_first_passes(two: Pool) -> None:
    assert two.run(own_backward) == [0.0, 0.0]


def left_gathered(rank: int, world: int) -> tuple[int, float, float]:
    """Weights there after a step of scores alone; then how far a score is off after weights were set by hand."""
    held = zero(build_kind("qwen3"), stage=3)
    inner: Any = held.model.module
    runtime, group = Runtime(held.model, SMALL), make_group(20, (3,))
    before = runtime.score(group.prompt, group.responses)[0]
    there = sum(p.ds_status.name != "NOT_AVAILABLE" for p in inner.parameters())
    # A rank's own part is written, as by a checkpoint; the whole is not told.
    for parameter in inner.parameters():
        parameter.ds_tensor.mul_(1.5)
    after = runtime.score(group.prompt, group.responses)[0]
    fresh = build_kind("qwen3")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.5)
    want = Runtime(fresh, SMALL).score(group.prompt, group.responses)[0]
    return there, float((after - want).abs().max()), float((after - before).abs().max())


def test_no_weight_is_kept_beyond_a_step(two: Pool) -> None:
    for there, error, moved in two.run(left_gathered):
        assert there == 0
        assert error < 1e-5
        assert moved > 1e-3


def most_held(rank: int, world: int) -> float:
    """The largest part of the model that is in memory as the head runs, over the first step's passes."""
    model = build_kind("qwen3", num_hidden_layers=8)
    held = zero(model, stage=3, **limits(model, 2))
    inner: Any = held.model.module
    whole = sum(p.ds_numel for p in inner.parameters())
    seen: dict[str, tuple[int, StorageWeakRef]] = {}
    found = []

    def used(module: nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                storage = parameter.data.untyped_storage()
                seen[str(storage._cdata)] = (storage.nbytes() // parameter.element_size(), StorageWeakRef(storage))

    for module in inner.modules():
        module.register_forward_pre_hook(used)
    inner.register_forward_pre_hook(lambda *_: seen.clear(), prepend=True)
    inner.lm_head.register_forward_hook(
        lambda *_: found.append(sum(size for size, reference in seen.values() if not reference.expired()))
    )
    group = make_group(61, (7, 7, 7))
    with Runtime(held.model, SMALL | CUT).transaction(group.prompt) as txn:
        replay_group(txn, group)
    assert len(found) >= PASSES_BACK
    return max(found) / whole


def test_the_first_passes_do_not_hold_the_whole_model(two: Pool) -> None:
    """Hooks on what autograd saves are handed the gathered weights, and must let them go."""
    for most in two.run(most_held):
        assert most < 0.5
