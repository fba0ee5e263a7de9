"""What the routers of experts do in one pass, and the gradient that their auxiliary loss sends into them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from longstraw.kernels.balance import expert_use, probability_gradient, with_gradient
from longstraw.runtime.upload import upload


class RouterTally:
    """Follows the routers of a pass.

    Args:
        lengths: tokens of each packed branch, or of the one chunk.
        counting: whether to count; a sweep routes what was counted at its capture.

    Attributes:
        counts_BN: int64 [B, N], choices of each expert by each branch's tokens, all routers together; None before the
            first router has run.
        probability_N: float64 [N], the sum of all tokens' probabilities, all routers together; None likewise.
        trained: whether a router's logits required a gradient.
    """

    def __init__(self, lengths: Sequence[int], *, counting: bool) -> None:
        self.counts_BN: Tensor | None = None
        self.probability_N: Tensor | None = None
        self.trained = False
        self._lengths, self._counting = tuple(lengths), counting
        self._seen: set[Hashable] = set()
        self._branch_S: Tensor | None = None
        self._coefficient_BN: Tensor | None = None

    @property
    def routers(self) -> int:
        """Routers that have run."""
        return len(self._seen)

    def rows(self, branch: int) -> int:
        """Tokens of a branch, once for each router that has run."""
        return self._lengths[branch] * self.routers

    def route(self, router: Hashable, logits_SN: Tensor, weights_Sk: Tensor, top_k: int) -> Tensor:
        """Called by the model's integration when a router has run. Returns the weights to go on with."""
        if self._counting and router not in self._seen:
            if self._branch_S is None:
                # Handed to the device once a pass, not once a router.
                cpu = torch.device("cpu")
                tokens = torch.tensor(self._lengths, device=cpu)
                numbers = torch.arange(len(self._lengths), device=cpu).repeat_interleave(tokens)
                self._branch_S = upload(numbers, logits_SN.device)
            use = expert_use(logits_SN.detach(), self._branch_S, len(self._lengths), top_k)
            if self.counts_BN is None or self.probability_N is None:
                self.counts_BN, self.probability_N = use.counts_BN, use.probability_N
            else:
                self.counts_BN += use.counts_BN
                self.probability_N += use.probability_N
        # A second run of the same router is a recomputation.
        self._seen.add(router)
        if not (torch.is_grad_enabled() and logits_SN.requires_grad):
            return weights_Sk
        self.trained = True
        return with_gradient(weights_Sk, logits_SN, self)

    def send(self, coefficients: Sequence[Tensor | None]) -> None:
        """Before the backward: what a probability of each expert is worth, [N] for each branch; None for nothing."""
        assert len(coefficients) == len(self._lengths)
        given = [coefficient for coefficient in coefficients if coefficient is not None]
        if not given:
            return
        if all(coefficient is given[0] for coefficient in coefficients):
            self._coefficient_BN = given[0][None]
        else:
            nothing = torch.zeros_like(given[0])
            self._coefficient_BN = torch.stack([nothing if c is None else c for c in coefficients])

    def logits_gradient(self, logits_SN: Tensor) -> Tensor | None:
        """`GradientSource`: the auxiliary loss's part of the gradient at a router's logits."""
        if self._coefficient_BN is None:
            return None
        if len(self._coefficient_BN) == 1:
            return probability_gradient(logits_SN, self._coefficient_BN)
        of_branches = zip(logits_SN.split(self._lengths), self._coefficient_BN, strict=True)
        return torch.cat([probability_gradient(logits, coefficient) for logits, coefficient in of_branches])
