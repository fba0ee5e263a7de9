"""Selections against a stable sort of all scores, for every split into blocks; ties go to the lower token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.kernels.selection import NOT_SELECTED, RunningTopK, index_scores
from longstraw.kernels.selection.naive import naive_index_scores, naive_topk


def running(scores: Tensor, k: int, block: int) -> Tensor:
    top = RunningTopK(len(scores), k, scores.device)
    for at in range(0, scores.shape[1], block):
        top.add(slice(0, len(scores)), scores[:, at : at + block], at)
    return top.result()


def scores_with_ties(queries: int, tokens: int, seed: int = 0) -> Tensor:
    """Few distinct values, most of them 0.0 and some of these -0.0, and tokens that are not seen."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (queries, tokens), generator=generator).float().clamp_min(-0.5)
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -0.0
    hidden = torch.arange(tokens)[None] > torch.arange(queries)[:, None] * 3 + 1
    return scores.masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("k", [1, 7, 40, 64])
def test_every_split_gives_the_stable_sort(k: int, block: int) -> None:
    for seed in range(3):
        scores = scores_with_ties(25, 64, seed)
        assert torch.equal(running(scores, k, block), naive_topk(scores, k))


@pytest.mark.parametrize("block", [5, 31])
def test_without_ties(block: int) -> None:
    scores = torch.randn(9, 31, generator=torch.Generator().manual_seed(0))
    found = running(scores, 6, block)
    assert torch.equal(found, naive_topk(scores, 6))
    assert torch.equal(found.long(), scores.topk(6).indices.sort(1).values)


@pytest.mark.parametrize("better", [1, 3, 60])
def test_a_full_selection_takes_in_what_is_better(better: int) -> None:
    """Later blocks in which few tokens, or many, beat what is held, and many only equal it."""
    generator = torch.Generator().manual_seed(better)
    scores = torch.randint(0, 2, (6, 192), generator=generator).float()
    for row in scores:
        row[64 + torch.randperm(128, generator=generator)[:better]] = 2.0
    assert torch.equal(running(scores, 20, 64), naive_topk(scores, 20))


def test_all_scores_equal_takes_the_first_tokens() -> None:
    found = running(torch.zeros(2, 50), 4, 7)
    assert found.tolist() == [[0, 1, 2, 3]] * 2


def test_a_selection_of_few_tokens_is_filled_up() -> None:
    scores = torch.tensor([[1.0, float("-inf"), 2.0]])
    assert running(scores, 3, 2).tolist() == [[0, 2, NOT_SELECTED]]


def test_one_query_does_not_touch_another() -> None:
    top = RunningTopK(2, 2, torch.device("cpu"))
    top.add(slice(0, 1), torch.tensor([[1.0, 5.0, 3.0]]), 0)
    assert top.result().tolist() == [[1, 2], [NOT_SELECTED, NOT_SELECTED]]


def make(queries: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, keys, weights = (
        torch.randn(*shape, generator=generator) for shape in ((queries, 3, 16), (tokens, 16), (queries, 3))
    )
    return q, keys, weights


def gathered(q: Tensor, keys: Tensor, weights: Tensor, queries: slice) -> Tensor:
    return torch.cat([scores for _, scores in index_scores(q, keys, weights, queries, 0.25)])


@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (40, 30), (70, 600)])
def test_scores(queries: int, tokens: int) -> None:
    q, keys, weights = make(queries, tokens)
    want = naive_index_scores(q, keys, weights, 0.25)
    torch.testing.assert_close(gathered(q, keys, weights, slice(0, queries)), want)


def test_a_score_does_not_depend_on_how_the_tokens_are_cut() -> None:
    q, keys, weights = make(70, 600)
    whole = gathered(q, keys, weights, slice(0, 70))
    for start, stop in ((0, 1), (3, 40), (69, 70)):
        for first, last in ((0, 600), (17, 300), (599, 600)):
            part = gathered(q, keys[first:last], weights, slice(start, stop))
            assert torch.equal(part, whole[start:stop, first:last])


def test_half_precision_keys_are_scored_in_float32() -> None:
    q, keys, weights = make(5, 40)
    q, keys = q.bfloat16(), keys.bfloat16()
    torch.testing.assert_close(
        gathered(q, keys, weights, slice(0, 5)), naive_index_scores(q, keys, weights, 0.25), rtol=1e-5, atol=1e-5
    )
