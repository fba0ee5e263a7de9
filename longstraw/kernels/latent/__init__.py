"""Attention of many heads over one shared latent row a token, all of them or a selection of them."""

from longstraw.kernels.latent.paged import latent_attention, latent_state_only

__all__ = ["latent_attention", "latent_state_only"]
