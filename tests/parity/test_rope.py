"""Every rotary scaling that transformers has, with rows on both sides of the length that the scaling extends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longstraw import Runtime
from tests.parity.models import SMALL, add_lora, build, check_parity, make_group, plain_logprobs

ORIGINAL = 40
"""Tokens that the models' scalings extend."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.3, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
LENGTH_DEPENDENT = ["dynamic", "longrope"]

BELOW, ACROSS, ABOVE = (20, (7, 1, 12)), (35, (3, 1, 12)), (61, (7, 1, 12))
"""Prompt and responses: every row within the original length, some of them, none."""


def rope_model(rope: str, kind: str = "llama") -> Any:
    parameters = {"rope_type": rope, "rope_theta": 100.0, **ROPES[rope]}
    extended = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    return build(kind, rope_parameters=parameters, max_position_embeddings=extended)


def test_no_rope_type_is_left_out() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPES)


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_the_scaling_changes_the_model(rope: str) -> None:
    scaled, plain = rope_model(rope), rope_model("default")
    ids = torch.arange(60)[None]
    same = torch.allclose(scaled(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
    assert same == (rope == "default")


@pytest.mark.parametrize("rope", sorted(set(ROPES) - set(LENGTH_DEPENDENT)))
@pytest.mark.parametrize("rows", [BELOW, ACROSS, ABOVE], ids=["below", "across", "above"])
def test_fixed_scalings(rope: str, rows: tuple[int, tuple[int, ...]]) -> None:
    check_parity(rope_model(rope), [make_group(*rows)])


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_rows_below_the_original_length(rope: str) -> None:
    check_parity(rope_model(rope), [make_group(*BELOW)])


def test_longrope_above_the_original_length_needs_no_row_tokens() -> None:
    check_parity(rope_model("longrope"), [make_group(*ABOVE)])


@pytest.mark.parametrize(("rope", "kind"), [("dynamic", "llama"), ("longrope", "llama"), ("longrope", "phi3")])
@pytest.mark.parametrize("rows", [BELOW, ACROSS, ABOVE], ids=["below", "across", "above"])
def test_rows_as_in_a_padded_batch(rope: str, rows: tuple[int, tuple[int, ...]], kind: str) -> None:
    check_parity(rope_model(rope, kind), [make_group(*rows)], row_tokens=80)


@pytest.mark.parametrize(("rope", "rows"), [("dynamic", ACROSS), ("dynamic", ABOVE), ("longrope", ACROSS)])
def test_rows_of_different_frequencies_are_refused(rope: str, rows: tuple[int, tuple[int, ...]]) -> None:
    group = make_group(*rows)
    runtime = Runtime(rope_model(rope), SMALL)
    with pytest.raises(ValueError, match="row_tokens=<"), runtime.transaction(group.prompt) as txn:
        txn.score(group.responses)


def test_row_tokens_below_a_row_is_refused() -> None:
    group = make_group(*ACROSS)
    runtime = Runtime(rope_model("dynamic"), SMALL)
    with pytest.raises(ValueError, match=r"row_tokens=34.*35"):
        runtime.transaction(group.prompt, row_tokens=34)
    with (
        pytest.raises(ValueError, match=r"responses\[2\].*47.*row_tokens=46"),
        runtime.transaction(group.prompt, row_tokens=46) as txn,
    ):
        txn.replay(group.responses)


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_several_groups_one_after_another_on_both_sides(rope: str) -> None:
    model = rope_model(rope)
    check_parity(model, [make_group(*rows, seed) for seed, rows in enumerate((ABOVE, BELOW, ACROSS))], row_tokens=80)


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_the_model_computes_as_before_afterwards(rope: str) -> None:
    model, group, short = rope_model(rope), make_group(*ABOVE), make_group(*BELOW)
    before = plain_logprobs(model, short.prompt, short.responses[0])[0]
    check_parity(model, [group], row_tokens=80)
    assert torch.equal(plain_logprobs(model, short.prompt, short.responses[0])[0], before)


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_under_lora(rope: str) -> None:
    check_parity(add_lora(rope_model(rope)), [make_group(*ACROSS)], row_tokens=80)
