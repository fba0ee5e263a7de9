"""The routers' auxiliary loss as users meet it: what the report says, why there is none, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw import Runtime
from longstraw.errors import TransactionStateError, UnsupportedModelError
from tests.families.router_loss import (
    COEFFICIENT,
    GROUP,
    asked_for,
    balance_loss,
    check,
    plain_aux_step,
    replay_aux,
)
from tests.families.test_gated_delta import exact_oracle, rechunked  # noqa: F401
from tests.families.windowed_models import windowed_model
from tests.parity.models import (
    assert_parity,
    build,
    lane_loss,
    plain_step,
    replay_group,
    settings,
    worst,
)


def test_detached_leaves_out_the_prompts_share_of_the_gradient() -> None:
    from transformers import DynamicCache

    model = asked_for(windowed_model("qwen3_moe", oracle=False))
    reference, exact = copy.deepcopy(model), copy.deepcopy(model)
    expected = plain_aux_step(exact, GROUP)
    with Runtime(model, settings(gradient={"prompt": "detached"})).transaction(GROUP.prompt) as txn:
        assert replay_aux(txn, GROUP) == pytest.approx(expected, rel=1e-6)
    assert "no gradient through the prompt's share" in str(txn.report)
    assert worst(model, exact)[0][0] > 0.1

    losses, logits = [], []
    for i, response in enumerate(GROUP.responses):
        cache = DynamicCache(config=reference.config)
        options = {"past_key_values": cache, "output_router_logits": True}
        with torch.no_grad():
            prompt = reference(GROUP.prompt[None, :-1], **options).router_logits
        out = reference(torch.cat([GROUP.prompt[-1:], response])[None], **options)
        logits.append([torch.cat(pair) for pair in zip(prompt, out.router_logits, strict=True)])
        log_p = out.logits[0, :-1].log_softmax(-1)
        losses.append(GROUP.loss(i, log_p.gather(-1, response[:, None])[:, 0], None))
    aux = balance_loss(reference, tuple(torch.cat(rows) for rows in zip(*logits, strict=True)))
    (torch.stack(losses).sum() + COEFFICIENT * aux).backward()
    assert_parity(model, reference)


def test_a_loss_without_it_has_no_effect_and_the_report_says_so() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    assert_parity(model, reference)
    assert (txn.report.aux_loss_scale, txn.report.aux_loss_prompt_weight) == (0.0, 4)
    assert "no loss asked for its gradient" in str(txn.report)


def test_the_report_says_how_often_a_prompt_token_counts() -> None:
    report = check(asked_for(windowed_model("qwen3_moe")))
    assert "with coefficient 3, each prompt token counted 4 time(s)" in str(report)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: asked_for(build("llama")), "LlamaForCausalLM has no routers of experts"),
        (lambda: windowed_model("mixtral"), "config.output_router_logits is False; set it to True"),
    ],
)
def test_why_there_is_none(model: Any, reason: str) -> None:
    with Runtime(model(), settings()).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(TransactionStateError, match=reason):
                _ = lane.aux_loss
            lane.skip()
    assert txn.report.aux_loss is None
    assert "auxiliary" not in str(txn.report)
    assert "count" not in txn.report.seconds


def test_a_router_that_returns_another_order_is_refused() -> None:
    model = asked_for(windowed_model("mixtral"))
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: output[::-1])
    with pytest.raises(UnsupportedModelError, match="MixtralTopKRouter does not return logits, weights and choices"):
        Runtime(model, settings()).transaction(GROUP.prompt)


def test_a_router_that_serves_two_layers_is_refused() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(UnsupportedModelError, match="layer 1 shares its Qwen3MoeTopKRouter with an earlier layer"):
        Runtime(model, settings()).transaction(GROUP.prompt)
    model.config.output_router_logits = False
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    assert_parity(model, reference)


def test_routers_of_one_weight_are_followed_one_by_one() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    model.model.layers[1].mlp.gate.weight = model.model.layers[0].mlp.gate.weight
    check(model)


def replay_with(loss: Any) -> None:
    with Runtime(asked_for(windowed_model("qwen3_moe")), settings()).transaction(GROUP.prompt) as txn:
        for number, lane in enumerate(txn.replay(GROUP.responses)):
            lane.backward(loss(number, lane))


def test_lanes_with_different_coefficients() -> None:
    def loss(number: int, lane: Any) -> Tensor:
        value = lane_loss(GROUP, lane)
        return value + 0.5 * lane.aux_loss if number == 0 else value

    with pytest.raises(TransactionStateError, match=r"weight 0 in the lane of .* gave it 0\.5 in that of branches"):
        replay_with(loss)


def test_a_loss_that_is_not_a_number_is_the_users_to_see() -> None:
    """A loss scale that overflows, say: the step goes on, as an ordinary one would, and whoever scales skips it."""
    replay_with(lambda number, lane: lane_loss(GROUP, lane) + float("nan") * lane.aux_loss)


def test_another_lanes_share() -> None:
    seen: list[Any] = []

    def loss(number: int, lane: Any) -> Tensor:
        seen.append(lane.aux_loss)
        return lane_loss(GROUP, lane) + seen[0]

    with pytest.raises(TransactionStateError, match="another lane's"):
        replay_with(loss)


def test_a_backward_by_hand() -> None:
    def loss(number: int, lane: Any) -> Tensor:
        lane.aux_loss.backward()
        return lane_loss(GROUP, lane)

    with pytest.raises(TransactionStateError, match="by hand"):
        replay_with(loss)


def test_a_loss_of_nothing_else() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    nothing = dataclasses.replace(GROUP, loss=lambda i, logprobs, entropies: 0.0 * logprobs.sum())
    plain_aux_step(reference, nothing)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(COEFFICIENT * lane.aux_loss)
    assert_parity(model, reference)
