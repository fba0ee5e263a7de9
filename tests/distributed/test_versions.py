"""Releases of frameworks without the hooks that a step needs are refused, by their version."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from tests.distributed.pool import Pool
from tests.distributed.steps import build_kind
from tests.distributed.wraps import fsdp2, zero
from tests.parity.models import SMALL


def unshards_nothing(rank: int, world: int) -> str:
    held = fsdp2(build_kind("qwen3"))
    with patch.object(FSDPModule, "unshard", lambda self, async_op=False: None):
        try:
            Runtime(held.model, SMALL)
        except UnsupportedModelError as error:
            return str(error)
    return ""


def test_an_fsdp2_whose_units_do_not_gather(two: Pool) -> None:
    for text in two.run(unshards_nothing):
        assert f"torch {torch.__version__}: FSDP2's unshard() leaves" in text


def without_the_boundary(rank: int, world: int) -> str:
    import deepspeed

    held = zero(build_kind("qwen3"), stage=2)
    engine = deepspeed.DeepSpeedEngine
    with patch.object(engine, "coalesce_grad_reduction", new=None):
        del engine.coalesce_grad_reduction
        try:
            Runtime(held.model, SMALL)
        except UnsupportedModelError as error:
            return str(error).replace(deepspeed.__version__, "VERSION")
        finally:
            engine.coalesce_grad_reduction = None  # for the patch to undo
    return ""


def test_a_zero_that_keeps_the_boundary_to_itself(two: Pool) -> None:
    for text in two.run(without_the_boundary):
        assert text.startswith("deepspeed VERSION has no coalesce_grad_reduction()")
