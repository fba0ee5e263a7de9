"""Layers that keep keys and values: their spec, and their attention in a pass."""

from __future__ import annotations

from torch import Tensor

from longstraw.kernels.attention import choose_ops, keep_state_only, kv_views, paged_attention
from longstraw.kernels.attention.merge import merge_dtype
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.layer_io import LayerIO
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.token_pages import TokenPages

KV, OUT, LSE = "kv", "attention_out", "attention_lse"


def kv_spec(layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, sinks_H: Tensor | None = None) -> LayerSpec:
    """The spec of a layer with plain attention, from its tensors."""
    heads, kv_heads, head_dim = q_BHSD.shape[1], k_BKSD.shape[1], k_BKSD.shape[3]
    fields = tuple(Field(name=name, shape=(kv_heads, head_dim)) for name in ("k", "v"))
    trained = k_BKSD.requires_grad or v_BKSD.requires_grad
    # Beside a trained mixer there can be an attention that no gradient passes.
    backward = trained or q_BHSD.requires_grad or (sinks_H is not None and sinks_H.requires_grad)
    kv = StateSpec(name=KV, kind=StateKind.TOKEN, fields=fields, dtype=k_BKSD.dtype, trained=trained, backward=backward)
    out = Field(name=OUT, shape=(heads, head_dim))
    lse = Field(name=LSE, shape=(heads,))
    return LayerSpec(
        index=layer,
        states=(
            kv,
            StateSpec(name=OUT, kind=StateKind.TOKEN, fields=(out,), dtype=q_BHSD.dtype, output=True),
            StateSpec(name=LSE, kind=StateKind.TOKEN, fields=(lse,), dtype=merge_dtype(q_BHSD.dtype), output=True),
        ),
        # The output and its log-sum-exp are kept; merging them and summing dq takes float32 copies.
        kept_bytes=heads * (head_dim * q_BHSD.element_size() + 4),
        workspace_bytes=24 * heads * head_dim,
        skips_unused_output=True,
    )


def attend(
    forward: ForwardPass,
    layer: int,
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Layer `layer`'s attention in a pass; shapes as in `kernels.attention.paged_attention`."""
    io = forward.layer(kv_spec(layer, q_BHSD, k_BKSD, v_BKSD, sinks_H))
    pages = KvPages(io)
    if io.output_unused:
        out = keep_state_only(q_BHSD, k_BKSD, v_BKSD, pages)
    else:
        ops = choose_ops(q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[3], softcap)
        out = paged_attention(
            q_BHSD, k_BKSD, v_BKSD, lengths=io.lengths, pages=pages, ops=ops, scale=scale, sinks_H=sinks_H
        )

    def write(rows_SC: Tensor) -> None:
        k_rows, v_rows = kv_views(rows_SC, k_BKSD.shape[1], k_BKSD.shape[3])
        k_rows.copy_(k_BKSD)
        v_rows.copy_(v_BKSD)

    io.fill(KV, write)
    if io.is_capture and io.keeps_output:
        kept_out, kept_lse = pages.computed
        io.fill(OUT, lambda rows_SC: rows_SC.copy_(kept_out[0].transpose(0, 1).flatten(1)))
        io.fill(LSE, lambda rows_SC: rows_SC.copy_(kept_lse[0].T))
    return out


class KvPages(TokenPages):
    """Pages of keys and values, and of the layer's outputs where those are kept for the sweep.

    Attributes:
        computed: the output and its log-sum-exp, once they are.
    """

    computed: tuple[Tensor, Tensor]

    def __init__(self, io: LayerIO) -> None:
        super().__init__(io, KV)

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        kept = super().kept_output()
        if kept is not None or not (self._io.is_sweep and self._io.keeps_output):
            return kept
        out_SHD = self._io.read_output(OUT).unflatten(1, self._io.spec.spec(OUT).fields[0].shape)
        known = out_SHD.transpose(0, 1)[None], self._io.read_output(LSE).T[None].contiguous()
        super().keep_output(*known)
        return known

    def keep_output(self, out: Tensor, lse: Tensor) -> None:
        self.computed = (out, lse)
        super().keep_output(out, lse)
