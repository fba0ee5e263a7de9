"""Collectives of the runtime's own: agreement between ranks on the CPU, and gradients averaged over ranks."""

from longstraw.collectives.average import all_reduce_mean
from longstraw.collectives.ranks import Ranks
from longstraw.collectives.tally import GATHER, REDUCE, SCATTER, CollectiveMeter, Tally
from longstraw.collectives.watcher import BROKEN_NOTICE, FailureWatcher

__all__ = [
    "BROKEN_NOTICE",
    "GATHER",
    "REDUCE",
    "SCATTER",
    "CollectiveMeter",
    "FailureWatcher",
    "Ranks",
    "Tally",
    "all_reduce_mean",
]
