"""The routers' auxiliary loss: its value and every parameter's gradient are those of one batch of the group's rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longstraw import Runtime
from tests.families import delta_models
from tests.families.router_loss import plain_aux_step, replay_aux
from tests.families.windowed_models import windowed_model
from tests.parity.models import assert_idle, assert_parity, make_group, settings

KINDS = ["mixtral", "mixtral-windowed", "qwen3_moe", "qwen3_moe-windowed", "gpt_oss"]
CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
GROUP = make_group()


def asked_for(model: Any) -> Any:
    """The model with transformers' switch set."""
    model.config.get_text_config().output_router_logits = True
    return model


def check(model: Any, config: Any = None, *, group: Any = GROUP, score: bool = False, tolerance: float = 1e-6) -> Any:
    """One step with the auxiliary loss against plain autograd. Returns the report."""
    reference = copy.deepcopy(model)
    expected = plain_aux_step(reference, group)
    with Runtime(model, settings() if config is None else config) as runtime:
        with runtime.transaction(group.prompt) as txn:
            old = txn.score(group.responses) if score else None
            found = replay_aux(txn, group)
            assert ("count" in txn.report.seconds) == (old is None and txn.report.lanes > 1)
        assert_idle(runtime)
    assert found == pytest.approx(expected, rel=tolerance)
    assert txn.report.aux_loss == pytest.approx(expected, rel=tolerance)
    assert_parity(model, reference, tolerance)
    return txn.report


@CHECKPOINT
@pytest.mark.parametrize("kind", KINDS)
def test_attention_families(kind: str, checkpoint: bool) -> None:
    report = check(asked_for(windowed_model(kind)), settings(replay={"checkpoint": checkpoint}))
    assert report.lanes > 1
