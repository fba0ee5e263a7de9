"""Four ranks with five groups, one, none and two: gradients and trained weights are those of the ordinary steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.steps import compare_training
from tests.distributed.test_parity import EACH_PASS, check, check_kind
from tests.distributed.wraps import ddp, fsdp2, zero

WRAPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (ddp, {}),
    "fsdp2": (fsdp2, {}),
    "fsdp2-each_pass": (fsdp2, {"config": EACH_PASS}),
    "fsdp2-kept": (fsdp2, {"reshard": False}),
    "fsdp2-kept-each_pass": (fsdp2, {"reshard": False, "config": EACH_PASS}),
    "zero-1": (zero, {"stage": 1}),
    "zero-2": (zero, {"stage": 2}),
    "zero-3": (zero, {"stage": 3}),
}
BY_WRAP = pytest.mark.parametrize("wrap", WRAPS)

GROUP = (60, (40, 1, 9))
UNEVEN = ([(700, (33, 2)), GROUP, GROUP, (60, (5,)), (2, (3, 4))], [(60, (1, 17))], [], [GROUP, (1, (6,))])
SHORT = ([(61, (7, 1, 12)), (30, (3, 9))], [(20, (1, 17))], [], [(83, (5,))])
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@BY_WRAP
def test_uneven_ranks(four: Pool, wrap: str) -> None:
    function, options = WRAPS[wrap]
    config = options.get("config", {}) | {"capture": {"chunk_tokens": 100}}
    found = four.run(compare_training, function, shapes=UNEVEN, timeout=200, **(options | {"config": config}))
    check(found)


@BY_WRAP
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_text"])
def test_mixtures_and_hybrids(four: Pool, wrap: str, kind: str) -> None:
    function, options = WRAPS[wrap]
    layers = HYBRID if kind == "qwen3_5_text" else {}
    check_kind(four, function, kind, shapes=SHORT, model_options=layers, timeout=200, **options)
