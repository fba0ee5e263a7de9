"""`torch.set_default_device` is the user's: what the runtime makes for the host is made there.

The default is the meta device here, from which nothing can be read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from tests.families import delta_models, latent_models, mamba2_models
from tests.families.router_loss import asked_for, plain_aux_step, replay_aux
from tests.families.windowed_models import windowed_model
from tests.parity.models import assert_parity, build, make_group, replay_group, settings, worst

GROUP = make_group()


def step(model: Any, tmp_path: Path, replay: Callable[..., Any]) -> None:
    tiers = [
        {"kind": "device", "budget": "4KiB"},
        {"kind": "host", "budget": "16KiB"},
        {"kind": "nvme", "path": str(tmp_path), "budget": "16MiB"},
    ]
    with torch.device("meta"), Runtime(model, settings(tiers=tiers)).transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        replay(txn, GROUP)


@pytest.mark.parametrize(
    "model",
    [
        lambda: build("qwen3"),
        lambda: windowed_model("gemma3"),
        lambda: delta_models.build("qwen3_5_text", "LA"),
        lambda: mamba2_models.build("bamba", "LA"),
        lambda: latent_models.tiny("glm_moe_dsa"),
    ],
    ids=["qwen3", "gemma3", "qwen3_5", "bamba", "glm_moe_dsa"],
)
def test_a_step(tmp_path: Path, model: Callable[[], Any]) -> None:
    made = model()
    reference = copy.deepcopy(made)
    with Runtime(reference, settings()).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    step(made, tmp_path, replay_group)
    assert worst(made, reference)[0][0] <= 1e-9


def test_a_step_with_the_routers_auxiliary_loss(tmp_path: Path) -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    plain_aux_step(reference, GROUP)
    step(model, tmp_path, replay_aux)
    assert_parity(model, reference)
