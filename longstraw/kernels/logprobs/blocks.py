"""How many blocks of logits the LM head holds at once, for whoever plans memory."""

from __future__ import annotations


def blocks_held(*, linear: bool, entropy: bool, softcap: bool) -> int:
    """Blocks of logits in the wide dtype that are there together at most, workspaces of single operators included.

    Args:
        linear: `head_logprobs` computes them, else `module_logprobs`.
        entropy: whether entropies are computed too.
        softcap: whether the logits have a soft cap.

    `tests/kernels/test_logprobs.py` counts them.
    """
    if not linear:
        return 3 + softcap + 2 * entropy
    # Without entropies the soft cap's slope takes the place of what a sum over exponentials needs.
    return 2 + entropy + (softcap and entropy)
