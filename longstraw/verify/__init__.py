"""Every parameter's gradient, from the runtime and from plain autograd on unpadded rows, side by side."""

from longstraw.verify.check import VerifyOptions, VerifyResult, verify_model
from longstraw.verify.gradients import (
    GradientDifference,
    clone_gradients,
    compare_gradients,
    default_tolerance,
)
from longstraw.verify.plain import plain_gradients, plain_logprobs

__all__ = [
    "GradientDifference",
    "VerifyOptions",
    "VerifyResult",
    "clone_gradients",
    "compare_gradients",
    "default_tolerance",
    "plain_gradients",
    "plain_logprobs",
    "verify_model",
]
