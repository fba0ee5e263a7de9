"""The short causal convolution before the delta rule, over packed branches that continue from one window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv(
    x_SC: Tensor,
    window_WC: Tensor | None,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    *,
    lengths: Sequence[int],
) -> Tensor:
    """A depthwise convolution in which each branch's first tokens see the window before it.

    Args:
        x_SC: [S, channels], the branches one after another.
        window_WC: [kernel - 1, channels], the inputs before every branch, in any float dtype; None for zeros.
        weight_CK: [channels, kernel].
        bias_C: [channels] or None.
        lengths: tokens of each branch; they add up to S.

    Returns:
        [S, channels] in the dtype of `x_SC`, before the activation.
    """
    window = weight_CK.shape[1] - 1
    if window == 0:
        joined_LC = x_SC
    else:
        parts: list[Tensor] = []
        for part in x_SC.split(tuple(lengths)):
            # Narrowed for each branch anew: the branches' gradients then add up in the window's own, wider dtype.
            parts += [_start(x_SC, window_WC, window), part]
        joined_LC = torch.cat(parts)
    out_1CL = F.conv1d(
        joined_LC.t().unsqueeze(0).to(weight_CK.dtype), weight_CK.unsqueeze(1), bias_C, groups=weight_CK.shape[0]
    )
    out_LC = out_1CL[0].t().to(x_SC.dtype)
    # Each branch has `length` outputs; the `window` rows between two branches mix both and are left out.
    starts = [sum(lengths[:branch]) + branch * window for branch in range(len(lengths))]
    outs = [out_LC[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def last_rows(x_SC: Tensor, window_WC: Tensor | None, window: int) -> Tensor:
    """The window after one branch `x_SC`, [window, channels]; older rows come from the window before it."""
    if len(x_SC) >= window:
        return x_SC[len(x_SC) - window :]
    return torch.cat([_start(x_SC, window_WC, window)[len(x_SC) :], x_SC])


def _start(x_SC: Tensor, window_WC: Tensor | None, window: int) -> Tensor:
    return x_SC.new_zeros(window, x_SC.shape[1]) if window_WC is None else window_WC.to(x_SC.dtype)
