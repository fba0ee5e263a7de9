"""Layers with a sliding window: they carry the last W - 1 keys and values, and nothing more of the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.windowed import Slide, choose_window_ops, keep_window_only, windowed_attention
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.layer_io import LayerIO
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.passes import ForwardPass

WINDOW = "window"


def window_spec(layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int) -> LayerSpec:
    """The spec of a layer whose tokens see `window` tokens, themselves included."""
    heads, kv_heads, head_dim = q_BHSD.shape[1], k_BKSD.shape[1], k_BKSD.shape[3]
    fields = tuple(Field(name=name, shape=(window - 1, kv_heads, head_dim)) for name in ("k", "v"))
    trained = k_BKSD.requires_grad or v_BKSD.requires_grad
    rows = StateSpec(name=WINDOW, kind=StateKind.CARRIED, fields=fields, dtype=k_BKSD.dtype, trained=trained)
    return LayerSpec(
        index=layer,
        states=(rows,),
        kept_bytes=heads * (head_dim * q_BHSD.element_size() + 4),
        workspace_bytes=24 * heads * head_dim,
    )


def attend_window(
    forward: ForwardPass,
    layer: int,
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    scale: float,
    *,
    window: int,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Layer `layer`'s attention in a pass; shapes as in `kernels.windowed.windowed_attention`."""
    io = forward.layer(window_spec(layer, q_BHSD, k_BKSD, v_BKSD, window))
    state = _CarriedWindow(io, k_BKSD, window)
    window_k, window_v = state.rows()
    if io.output_unused:
        out = keep_window_only(q_BHSD, k_BKSD, v_BKSD, state)
    else:
        ops = choose_window_ops(q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[3], softcap)
        out = windowed_attention(
            q_BHSD, k_BKSD, v_BKSD, window_k, window_v, sinks_H, lengths=io.lengths, state=state, ops=ops, scale=scale
        )
    if io.is_capture:
        state.write(window_k, window_v, k_BKSD, v_BKSD)
    return out


class _CarriedWindow:
    """`WindowState` in a carried state: keys and values, token-major, oldest first, zeros where there are no tokens."""

    def __init__(self, io: LayerIO, like_BKSD: Tensor, window: int) -> None:
        self.slide = Slide(window=window, prefix=io.prefix_rows, own=like_BKSD.shape[2])
        self._io, self._like = io, like_BKSD.detach()[:, :, :0]
        self._shape = (2, window - 1, like_BKSD.shape[1], like_BKSD.shape[3])

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values [1, num_kv_heads, slide.before, head_dim] before this pass's rows."""
        held = self._io.kept(WINDOW) if self._io.recomputing else self._io.read_carried(WINDOW)
        if held is None:
            return self._like, self._like
        self._io.keep(WINDOW, held)
        return self._views(held, self.slide.before)

    def write(self, window_k: Tensor, window_v: Tensor, k: Tensor, v: Tensor) -> None:
        """Carry on what the window holds after this pass's rows."""
        slide = self.slide
        held = torch.zeros(self._shape, dtype=k.dtype, device=k.device)
        for into, old, own in zip(self._views(held, slide.after), (window_k, window_v), (k, v), strict=True):
            into[:, :, : slide.staying] = old[:, :, slide.before - slide.staying :]
            into[:, :, slide.staying :] = own[:, :, slide.own - slide.entering :]
        self._io.write_carried(WINDOW, held)

    def next_gradient(self) -> tuple[Tensor, Tensor] | None:
        arrived = self._io.carried_gradient(WINDOW)
        return None if arrived is None else self._views(arrived, self.slide.after)

    def add_gradient(self, dk_BKTD: Tensor, dv_BKTD: Tensor) -> None:
        if not (self.slide.before and self._io.spec.spec(WINDOW).trained):
            return
        whole = torch.zeros(self._shape, dtype=dk_BKTD.dtype, device=dk_BKTD.device)
        for into, gradient in zip(self._views(whole, self.slide.before), (dk_BKTD, dv_BKTD), strict=True):
            into.copy_(gradient)
        self._io.add_carried_gradient(WINDOW, whole)

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        return self._io.kept("attention")

    def keep_output(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        self._io.keep("attention", (out_BHSD, lse_BHS))

    def _views(self, held: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        k, v = held.view(self._shape)[:, :tokens].transpose(1, 2).unsqueeze(1)
        return k, v
