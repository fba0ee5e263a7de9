"""Mamba-2's state space duality (SSD), over packed branches that continue from one carried state."""

from longstraw.kernels.ssd.chunked import ssd, workspace_bytes

__all__ = ["ssd", "workspace_bytes"]
