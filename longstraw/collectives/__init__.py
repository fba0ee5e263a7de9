"""Collectives of the runtime's own: agreement between ranks on the CPU, and gradients averaged over ranks."""

from longstraw.collectives.average import all_reduce_mean
from longstraw.collectives.ranks import Ranks

__all__ = ["Ranks", "all_reduce_mean"]
