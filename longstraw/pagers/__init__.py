"""Moves pages: the tiers behind one protocol, staging slots, and streams with look-ahead."""

from longstraw.pagers.device import DevicePager
from longstraw.pagers.host import HostPager
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.protocol import Extent, Pager
from longstraw.pagers.staging import Slot, StagingPool
from longstraw.pagers.stream import PageStream, Request
from longstraw.pagers.transfer import Transfer

__all__ = [
    "DevicePager",
    "Extent",
    "HostPager",
    "NvmePager",
    "PageStream",
    "Pager",
    "Request",
    "Slot",
    "StagingPool",
    "Transfer",
]
