"""Layers that keep one latent row a token, all of which or a selection of which later tokens attend to."""

from __future__ import annotations

from torch import Tensor

from longstraw.kernels.latent import latent_attention, latent_state_only
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.selection import INDEX, Index, index_spec, select, selection_bytes
from longstraw.runtime.token_pages import TokenPages

LATENT = "latent"


def latent_spec(layer: int, q_SHC: Tensor, rows_SC: Tensor, value_dim: int, index: Index | None) -> LayerSpec:
    """The spec of a layer with latent attention, from its tensors."""
    heads, width = q_SHC.shape[1:]
    fields = (Field(name="c_kv", shape=(value_dim,)), Field(name="k_rope", shape=(width - value_dim,)))
    latent = StateSpec(
        name=LATENT, kind=StateKind.TOKEN, fields=fields, dtype=rows_SC.dtype, trained=rows_SC.requires_grad
    )
    return LayerSpec(
        index=layer,
        # Tokens are selected before their latents are read.
        states=(latent,) if index is None else (index_spec(index), latent),
        # The latent output and its log-sum-exp are kept, and the selection.
        kept_bytes=heads * (value_dim * q_SHC.element_size() + 4) + (0 if index is None else selection_bytes(index)),
        # Merging the output and summing dq takes float32 copies.
        workspace_bytes=heads * 4 * (2 * value_dim + width) + (0 if index is None else 3 * selection_bytes(index)),
        skips_unused_output=True,
    )


def attend(
    forward: ForwardPass,
    layer: int,
    q_SHC: Tensor,
    rows_SC: Tensor,
    *,
    value_dim: int,
    scale: float,
    index: Index | None = None,
    sparse: bool = False,
) -> Tensor:
    """Layer `layer`'s attention in a pass; shapes as in `kernels.latent.latent_attention`.

    Args:
        index: what selects tokens, in a layer that does so itself.
        sparse: whether the layer attends to selected tokens; without an `index` to those of the last layer with one.

    Returns:
        [S, num_heads, value_dim].
    """
    io = forward.layer(latent_spec(layer, q_SHC, rows_SC, value_dim, index))
    pages = TokenPages(io, LATENT)
    if io.output_unused:
        out = latent_state_only(q_SHC, rows_SC, pages, value_dim=value_dim)
    else:
        selection = select(io, index) if sparse else None
        out = latent_attention(
            q_SHC, rows_SC, lengths=io.lengths, pages=pages, value_dim=value_dim, scale=scale, selection_SK=selection
        )
    if index is not None:
        keys_SD = index.keys_SD
        io.fill(INDEX, lambda into_SD: into_SD.copy_(keys_SD))
    io.fill(LATENT, lambda into_SC: into_SC.copy_(rows_SC.detach()))
    return out
