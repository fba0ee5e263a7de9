"""Pinned rotary embeddings: a part of a row gets the frequencies of the whole row."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.integrations.transformers import rope
from tests.parity.models import SMALL, assert_parity, build, lane_loss, make_group, paged_step, plain_step, worst

LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
SCALINGS: dict[str, tuple[dict[str, Any], int]] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 40),
    "longrope": (LONGROPE, 160),
}


def scaled(name: str) -> Any:
    parameters, positions = SCALINGS[name]
    return build("llama", rope_parameters=parameters | {"rope_theta": 100.0}, max_position_embeddings=positions)


@pytest.mark.parametrize("name", sorted(SCALINGS))
@pytest.mark.parametrize("row_tokens", [30, 40, 41, 80])
def test_a_part_of_a_row_gets_the_rows_frequencies(name: str, row_tokens: int) -> None:
    whole, part = scaled(name).model.rotary_emb, scaled(name).model.rotary_emb
    hidden = torch.zeros(1, row_tokens, 32, dtype=torch.float64)
    expected = whole(hidden, torch.arange(row_tokens)[None])
    # A longer row before must leave no trace.
    part(hidden, torch.arange(100)[None])
    with rope.pinned([part], row_tokens):
        for start, stop in ((0, 7), (7, 20), (20, 30)):
            found = part(hidden[:, start:stop], position_ids=torch.arange(start, stop)[None])
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b[:, start:stop])
    assert not part._forward_hooks
    assert not part._forward_pre_hooks


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_frequencies_key_is_equal_where_the_frequencies_are(name: str) -> None:
    rotary = scaled(name).model.rotary_emb
    lengths = (10, 39, 40, 41, 42, 80)
    tables = {n: rotary(torch.zeros(1, 1, 32), torch.tensor([[5, n - 1]]))[0][0, 0] for n in lengths}
    for a in lengths:
        for b in lengths:
            same = rope.frequencies_key([rotary], a) == rope.frequencies_key([rotary], b)
            assert same == torch.equal(tables[a], tables[b]), (a, b)


def test_fixed_scalings_need_no_pinning() -> None:
    model = build("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0})
    assert rope.rotary_modules(model) == []


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_without_pinning_the_gradient_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(61, (7, 1, 12))
    model, reference = scaled(name), scaled(name)
    plain_step(reference, [group], row_tokens=80)
    with monkeypatch.context() as patch:
        patch.setattr(rope, "pinned", lambda rotaries, row_tokens: nullcontext())
        runtime = Runtime(model, SMALL)
        with runtime.transaction(group.prompt, row_tokens=80) as txn:
            for lane in txn.replay(group.responses):
                lane.backward(lane_loss(group, lane))
    assert worst(model, reference)[0][0] > 1e-3
    model.zero_grad()
    paged_step(Runtime(model, SMALL), [group], row_tokens=80)
    assert_parity(model, reference)
