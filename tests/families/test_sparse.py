"""Selections of tokens: the same on every layout, at capture and in the sweep, with ties to the lower token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from longstraw.kernels.selection import NOT_SELECTED
from longstraw.runtime import latent, selection
from longstraw.runtime.layer_io import LayerIO
from tests.families.latent_models import SPARSE, check, reference_step, tiny
from tests.parity.models import SMALL, make_group, paged_step, replay_group, settings, worst

CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
KIND = pytest.mark.parametrize("kind", SPARSE)
DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])

Seen = dict[tuple[str, int, int], list[tuple[int, ...]]]
"""By purpose, layer and token, what the token selected each time that the layer ran. Branches' tokens are not told
apart here: a token of the same position in another branch is another entry of the list."""


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Every selection that is made or found within."""
    seen: Seen = {}

    def spy(io: LayerIO, index: Any) -> Tensor:
        chosen = selection.select(io, index)
        token = [io.prefix_rows + i for length in io.lengths for i in range(length)]
        for at, row in zip(token, chosen.tolist(), strict=True):
            key = (io._pass.purpose.value, io.spec.index, at)
            seen.setdefault(key, []).append(tuple(t for t in row if t != NOT_SELECTED))
        return chosen

    with monkeypatch.context() as patch:
        patch.setattr(latent, "select", spy)
        yield seen


def of(seen: Seen, purpose: str) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    return {key[1:]: rows for key, rows in seen.items() if key[0] == purpose}


def step(model: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Seen:
    group = make_group(61, (7, 1, 12, 2, 3))
    with recorded(monkeypatch) as seen, Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        txn.score(group.responses)
        replay_group(txn, group)
    return seen


@KIND
@pytest.mark.parametrize("top_k", [2, 5, 60, 2048])
def test_every_width_of_the_selection(kind: str, top_k: int) -> None:
    check(tiny(kind, index_topk=top_k), [make_group(61, (7, 1, 12, 2, 3))])


@KIND
def test_scores_do_tie_and_the_ties_decide_the_gradient(kind: str) -> None:
    """With two index heads most scores are 0.0: an oracle with ties to the higher token trains another model."""
    model, group = tiny(kind, num_hidden_layers=2, indexer_types=["full", "shared"]), make_group(61, (7, 1, 12))
    other, _ = reference_step(model, [group], to_lower=False)
    check(model, [group])
    assert worst(model, other)[0][0] > 1e-3


@KIND
@pytest.mark.parametrize("chunk", [1, 9, 23, 60])
@pytest.mark.parametrize(("page", "block"), [(1, 1), (4, 4), (5, 15), (16, 48), (64, 64)])
def test_ties_on_every_layout_equal_the_oracle(kind: str, chunk: int, page: int, block: int) -> None:
    config = settings(capture={"chunk_tokens": chunk}, pages={"tokens": page, "block_tokens": block})
    model = tiny(kind, num_hidden_layers=2, indexer_types=["full", "shared"])
    check(model, [make_group(61, (2, 1, 3))], config)


@KIND
@CHECKPOINT
@DTYPE
def test_the_sweep_selects_what_the_capture_selected(
    kind: str, checkpoint: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(kind).to(dtype)
    seen = step(model, settings(replay={"checkpoint": checkpoint}), monkeypatch)
    capture, sweep = of(seen, "capture"), of(seen, "sweep")
    # The last layer selects nothing where nobody reads its output.
    assert set(capture) == set(sweep) == {(layer, t) for layer in range(len(model.model.layers) - 1) for t in range(60)}
    for key, rows in capture.items():
        assert len(rows) == 1
        assert len(sweep[key]) == (2 if checkpoint else 1)
        assert set(sweep[key]) == set(rows), key
    assert all(len(rows[0]) == min(8, token + 1) for (_, token), rows in capture.items())


@KIND
@CHECKPOINT
@DTYPE
def test_replay_selects_what_scoring_selected(
    kind: str, checkpoint: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = step(tiny(kind).to(dtype), settings(replay={"checkpoint": checkpoint}), monkeypatch)
    score, replay = of(seen, "score"), of(seen, "replay")
    assert score.keys() == replay.keys()
    for key, rows in score.items():
        assert sorted(replay[key]) == sorted(rows * (2 if checkpoint else 1)), key


@KIND
def test_every_layout_selects_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [
        SMALL,
        settings(capture={"chunk_tokens": 7}, pages={"tokens": 4, "block_tokens": 8}),
        settings(capture={"chunk_tokens": 60}, replay={"lane_tokens": 64}),
    ]
    found = [step(tiny(kind), config, monkeypatch) for config in layouts]
    for purpose in ("capture", "replay"):
        first, *others = (of(seen, purpose) for seen in found)
        for other in others:
            assert {k: sorted(v) for k, v in other.items()} == {k: sorted(v) for k, v in first.items()}


def test_layers_share_a_selection_and_keep_no_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, group = tiny("glm_moe_dsa"), make_group(61, (7, 1, 12))
    with Runtime(model, SMALL) as runtime, runtime.transaction(group.prompt) as txn:
        kept = {key for key in txn._captured.state._segments if key[1] == "index"}
        txn.score(group.responses)
    assert kept == {(0, "index"), (2, "index")}
    seen = step(model, SMALL, monkeypatch)
    replay = of(seen, "replay")
    assert all(replay[1, token] == rows for (layer, token), rows in replay.items() if layer == 0)
    assert all(replay[3, token] == rows for (layer, token), rows in replay.items() if layer == 2)
    assert any(replay[2, token] != rows for (layer, token), rows in replay.items() if layer == 0)


def test_a_recomputed_layer_must_not_take_the_last_shared_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of recomputation: without what a layer kept, the first pair would get the second pair's selection."""
    model, group = tiny("glm_moe_dsa"), make_group(61, (7, 1, 12))
    reference, _ = reference_step(model, [group])
    config = settings(replay={"checkpoint": True})
    original = selection.select

    def forgetful(io: LayerIO, index: Any) -> Tensor:
        return io.shared("selection") if io.recomputing else original(io, index)  # type: ignore[return-value]

    monkeypatch.setattr(latent, "select", forgetful)
    paged_step(Runtime(model, config), [group])
    assert worst(model, reference)[0][0] > 1e-3


def test_a_first_layer_that_shares_is_refused() -> None:
    model = tiny("glm_moe_dsa", indexer_types=["shared", "full", "full", "shared"])
    with pytest.raises(UnsupportedModelError, match="layer 0 shares the selection of an earlier layer"):
        Runtime(model, SMALL)


def test_the_model_is_its_own_again_after_a_transaction() -> None:
    model, group = tiny("glm_moe_dsa"), make_group(30, (3, 1))
    row = torch.cat([group.prompt, group.responses[0]])[None]
    with torch.no_grad():
        before = model(row, use_cache=False).logits
        paged = Runtime(model, SMALL)
        with torch.enable_grad():
            paged_step(paged, [group])
        assert torch.equal(model(row, use_cache=False).logits, before)
    assert all("forward" not in vars(module) for module in model.modules())
