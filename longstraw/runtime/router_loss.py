"""The routers' auxiliary loss of a group, from counts that are known before its first backward.

Of the ordinary step's batch of G rows (prompt and response), with N experts, F_i choices of expert i, Q_i the sum of
its probabilities, and M rows (tokens times routers), the loss is sum_i c_i Q_i with c_i = N F_i / M^2: Switch
Transformers (arXiv 2101.03961), equations 4 to 6, over all routers jointly. Choices have no gradient. So a token's
share depends on the other tokens through c alone, and passes that know c can take the gradient one by one. A prompt
token counts G times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.errors import TransactionStateError
from longstraw.runtime.routers import RouterTally

_SAME = 1e-5
"""Relative difference below which two lanes gave the loss the same coefficient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Of one branch's tokens: int64 [N] choices of each expert, and tokens times routers."""

    counts_N: Tensor
    rows: int


class RouterLoss:
    """What a transaction knows of its prompt's and its branches' routing.

    Attributes:
        prompt_coefficient_N: float64 [N], what the sweep sends to each probability of each prompt token: over all
            lanes so far, its share of the loss, G times c. None where no loss has asked for any.
    """

    def __init__(self) -> None:
        self.prompt_coefficient_N: Tensor | None = None
        self._prompt: Choices | None = None
        self._prompt_probability_N: Tensor | None = None
        self._branches: dict[bytes, Choices] = {}

    # The prompt

    def begin_capture(self) -> None:
        """The prompt is captured, perhaps anew."""
        self._prompt = self._prompt_probability_N = None

    def captured(self, tally: RouterTally) -> None:
        """A chunk of the prompt has run."""
        assert tally.counts_BN is not None and tally.probability_N is not None
        counts_N, rows = tally.counts_BN[0], tally.rows(0)
        if self._prompt is None or self._prompt_probability_N is None:
            self._prompt, self._prompt_probability_N = Choices(counts_N=counts_N, rows=rows), tally.probability_N
            return
        self._prompt = Choices(counts_N=self._prompt.counts_N + counts_N, rows=self._prompt.rows + rows)
        self._prompt_probability_N = self._prompt_probability_N + tally.probability_N

    # Branches

    def counted(self, branches: Sequence[Tensor], tally: RouterTally) -> None:
        """Branches [R_i] have run in a pass of their own; what was known of them stays, so that c never changes."""
        assert tally.counts_BN is not None
        for i, branch in enumerate(branches):
            self._branches.setdefault(_key(branch), Choices(counts_N=tally.counts_BN[i], rows=tally.rows(i)))

    def uncounted(self, branches: Sequence[Tensor]) -> list[Tensor]:
        """Those of which nothing is known yet."""
        return [branch for branch in branches if _key(branch) not in self._branches]

    def forget_branches(self) -> None:
        """The weights have changed: later branches are routed by others than those that were counted."""
        self._branches.clear()

    def group(self, branches: Sequence[Tensor]) -> GroupLoss:
        """The loss of the branches that one `replay` was given."""
        return GroupLoss(self, branches)

    def add_prompt_share(self, coefficient_N: Tensor, rows: int) -> None:
        """Rows of the batch whose prompt share the sweep will send back."""
        share_N = rows * coefficient_N
        before_N = self.prompt_coefficient_N
        self.prompt_coefficient_N = share_N if before_N is None else before_N + share_N

    def total(self, branches: Sequence[Tensor]) -> Choices:
        """Of the whole batch, the prompt's once a branch."""
        known = [self._branches[_key(branch)] for branch in branches]
        counts_N = torch.stack([one.counts_N for one in known]).sum(0)
        rows = sum(one.rows for one in known)
        if self._prompt is not None:
            counts_N = counts_N + len(branches) * self._prompt.counts_N
            rows += len(branches) * self._prompt.rows
        return Choices(counts_N=counts_N, rows=rows)

    def with_prompt(self, probability_N: Tensor, rows: int) -> Tensor:
        """Sums of probabilities [N] of `rows` branches' tokens, with the prompt's once a branch."""
        prompt_N = self._prompt_probability_N
        return probability_N if prompt_N is None else probability_N + rows * prompt_N


class GroupLoss:
    """The auxiliary loss of one group, lane by lane. All branches must be counted before the first lane's value.

    Attributes:
        value: float64 [], the sum over the lanes that were asked for.
        scale: the coefficient that the user's loss gave it; 0 before the first backward.
        branches: G, how often each prompt token counts.
    """

    def __init__(self, routers: RouterLoss, branches: Sequence[Tensor]) -> None:
        self.value: Tensor | None = None
        self.scale = 0.0
        self.branches = len(branches)
        self._routers, self._group = routers, list(branches)
        self._coefficient_N: Tensor | None = None
        self._scaled_by: tuple[int, ...] | None = None

    def share(self, lane: Sequence[Tensor], tally: RouterTally) -> Tensor:
        """A lane's share, float64 []: its own tokens', and the prompt's once a branch. Shares add up to the loss."""
        if self._coefficient_N is None:
            total = self._routers.total(self._group)
            experts = len(total.counts_N)
            self._coefficient_N = total.counts_N.to(torch.float64) * (experts / total.rows**2)
        assert tally.probability_N is not None
        share = self._coefficient_N @ self._routers.with_prompt(tally.probability_N, len(lane))
        self.value = share if self.value is None else self.value + share
        return share

    def backward(self, scale: float, indices: tuple[int, ...], tally: RouterTally, *, exact: bool) -> Tensor | None:
        """The loss has given a lane's share the gradient `scale`.

        Returns what each probability of the lane's tokens is worth, float64 [N]; None for nothing.

        Raises:
            TransactionStateError: another lane's share was given another gradient. The prompt's share would still be
                defined, but the sum would not be a multiple of the ordinary step's loss.
        """
        if self._scaled_by is None:
            self.scale, self._scaled_by = scale, indices
        elif not (math.isclose(scale, self.scale, rel_tol=_SAME) or (math.isnan(scale) and math.isnan(self.scale))):
            raise TransactionStateError(
                f"lane.backward: the loss gives lane.aux_loss the weight {scale:g} in the lane of branches "
                f"{list(indices)}, and gave it {self.scale:g} in that of branches {list(self._scaled_by)}; lanes' "
                "shares add up to the group's auxiliary loss, so add the same coefficient times lane.aux_loss to each"
            )
        if scale == 0.0 or not tally.trained:
            return None
        assert self._coefficient_N is not None
        worth_N = scale * self._coefficient_N
        if exact:
            self._routers.add_prompt_share(worth_N, len(indices))
        return worth_N


def _key(branch: Tensor) -> bytes:
    return branch.cpu().numpy().tobytes()
