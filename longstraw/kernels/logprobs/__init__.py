"""Token log-probs and entropies from the LM head, block by block, so that no [tokens, vocabulary] matrix is held."""

from longstraw.kernels.logprobs.blockwise import head_logprobs, module_logprobs

__all__ = ["head_logprobs", "module_logprobs"]
