"""The entropy bonus: a reward for a spread-out policy, normalised like the loss it is added to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives.size import Aggregation, GroupSize, aggregate


def entropy_bonus(entropies: Sequence[Tensor], *, coef: float, size: GroupSize, how: Aggregation) -> Tensor:
    """`-coef` times a lane's share of the mean entropy (arXiv 1707.06347, equation 9); add it to a loss.

    Args:
        entropies: entropy of the policy's next-token distribution at each response token, in nats, each
            [R_i], with graph. These are whole distributions' entropies, not `-logprobs`, whose expected
            gradient is zero.
        coef: above 0.
        size: of the whole group, or of all groups of the step. With `dapo_loss(keep=...)` leave the filtered
            responses' entropies out here: `size` does not count them.
        how: the average that the loss itself takes (see `Aggregation`).

    Returns:
        A 0-dim tensor with graph.

    Raises:
        ConfigError: as `aggregate`; or `coef` is not above 0.
    """
    if not coef > 0:
        raise ConfigError(f"coef={coef} must be above 0; for no bonus, leave the term out")
    return -coef * aggregate(entropies, size=size, how=how)
