"""Grouped products of experts: torch takes what we say that it takes, and a loop is chosen only where it must be."""

from __future__ import annotations

import pytest
import torch

from longstraw.integrations.transformers.experts import loop_where_needed, refuses_grouped
from tests.families.windowed_models import windowed_model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 20, 21, 22])
def test_torch_agrees(width: int, dtype: torch.dtype) -> None:
    model = windowed_model("qwen3_moe", oracle=False, moe_intermediate_size=width, num_hidden_layers=1).to(dtype)
    model.set_experts_implementation("grouped_mm")

    def step() -> None:
        model(torch.arange(9)[None]).logits.float().sum().backward()

    if refuses_grouped(model) is None:
        step()
        return
    with pytest.raises(RuntimeError, match=r"strides should be multiple of 16 bytes|got Double"):
        step()


def test_the_loop_is_chosen_where_it_must() -> None:
    model = windowed_model("gpt_oss", oracle=False)
    model.set_experts_implementation("grouped_mm")
    assert loop_where_needed(model) == "torch's grouped products take no float64"
    assert model.config._experts_implementation == "eager"
    # Nothing is left to switch.
    assert loop_where_needed(model) is None


def test_what_works_or_was_chosen_stays() -> None:
    model = windowed_model("gpt_oss", oracle=False).float()
    model.set_experts_implementation("grouped_mm")
    assert loop_where_needed(model) is None
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("batched_mm")
    assert loop_where_needed(model.double()) is None
    assert model.config._experts_implementation == "batched_mm"


def test_a_dense_model_has_nothing_to_switch() -> None:
    assert loop_where_needed(windowed_model("qwen3", oracle=False)) is None
