"""A running top-k over blocks of scores, whose ties go to the lower token whatever the blocks are."""

from __future__ import annotations

import torch
from torch import Tensor

NOT_SELECTED = torch.iinfo(torch.int32).max
"""Fills the end of a selection that holds fewer than k tokens. Larger than any token, so that selections ascend."""


class RunningTopK:
    """The best `k` tokens of S queries among those seen so far.

    torch.topk leaves open which of equal scores it takes, and index scores of exactly 0.0 are common. Here the k-th
    best score is the threshold: everything above it is taken, and of what equals it the lowest tokens.

    Args:
        queries: S.
        k: tokens to select.
        device: of the scores.
    """

    def __init__(self, queries: int, k: int, device: torch.device) -> None:
        self._k = k
        self._scores = torch.full((queries, k), float("-inf"), device=device)
        self._tokens = torch.full((queries, k), NOT_SELECTED, dtype=torch.int32, device=device)

    def add(self, queries: slice, scores_NT: Tensor, first_token: int) -> None:
        """Take in the scores of consecutive tokens, all higher than any before.

        Args:
            queries: which queries these are.
            scores_NT: float32; -inf for a token that a query does not see.
            first_token: the token of the first column.
        """
        # Held tokens are lower than new ones, so a new one has to beat the worst of k held ones to get in.
        floor = self._scores[queries].amin(1, keepdim=True)
        enters = scores_NT > floor
        counts = enters.sum(1)
        widest = int(counts.max())
        if widest == 0:
            return
        if 2 * widest < scores_NT.shape[1]:
            self._merge(queries, *_packed(scores_NT, first_token, enters, counts, widest))
        else:
            new = torch.arange(first_token, first_token + scores_NT.shape[1], dtype=torch.int32, device=floor.device)
            self._merge(queries, scores_NT, new.expand(len(scores_NT), -1))

    def _merge(self, queries: slice, scores_NT: Tensor, tokens_NT: Tensor) -> None:
        # Held tokens come first and both ascend: columns are in token order, gaps aside.
        scores = torch.cat([self._scores[queries], scores_NT], dim=1)
        tokens = torch.cat([self._tokens[queries], tokens_NT], dim=1)
        threshold = scores.topk(self._k, dim=1, sorted=False).values.amin(1, keepdim=True)
        above = scores > threshold
        equal = (scores == threshold) & (scores > float("-inf"))
        room = self._k - above.sum(1, keepdim=True, dtype=torch.int32)
        taken = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
        # What is not taken goes to a column of its own, which is dropped.
        to = (taken.cumsum(1) - 1).masked_fill_(~taken, self._k)
        held = torch.full((len(scores), self._k + 1), float("-inf"), device=scores.device)
        self._scores[queries] = held.scatter_(1, to, scores)[:, :-1]
        names = torch.full_like(held, NOT_SELECTED, dtype=torch.int32)
        self._tokens[queries] = names.scatter_(1, to, tokens)[:, :-1]

    def result(self) -> Tensor:
        """Selected tokens, int32 [S, k], ascending, `NOT_SELECTED` at the end."""
        return self._tokens.contiguous()


def _packed(
    scores_NT: Tensor, first_token: int, enters_NT: Tensor, counts_N: Tensor, widest: int
) -> tuple[Tensor, Tensor]:
    """The scores and tokens that `enters_NT` marks, [N, widest], in token order; -inf and `NOT_SELECTED` behind."""
    rows, columns = enters_NT.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=rows.device) - (counts_N.cumsum(0) - counts_N)[rows]
    scores = torch.full((len(scores_NT), widest), float("-inf"), device=rows.device)
    tokens = torch.full((len(scores_NT), widest), NOT_SELECTED, dtype=torch.int32, device=rows.device)
    scores[rows, places] = scores_NT[rows, columns]
    tokens[rows, places] = (columns + first_token).to(torch.int32)
    return scores, tokens
