"""The gated delta rule and its short causal convolution, over packed branches that continue from one carried state."""

from longstraw.kernels.gated_delta.choose import BACKENDS, DeltaRule, choose_rule
from longstraw.kernels.gated_delta.convolution import causal_conv, last_rows
from longstraw.kernels.gated_delta.fla import fla_workspace_bytes

__all__ = ["BACKENDS", "DeltaRule", "causal_conv", "choose_rule", "fla_workspace_bytes", "last_rows"]
