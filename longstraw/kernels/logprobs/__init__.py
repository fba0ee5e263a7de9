"""Token log-probs and entropies from the LM head, block by block, so that no [tokens, vocabulary] matrix is held."""

from longstraw.kernels.logprobs.blocks import blocks_held
from longstraw.kernels.logprobs.blockwise import head_logprobs, module_logprobs

__all__ = ["blocks_held", "head_logprobs", "module_logprobs"]
