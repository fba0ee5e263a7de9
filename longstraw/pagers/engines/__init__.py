"""Engines of the nvme tier: what reads and writes its file, behind one protocol."""

from longstraw.pagers.engines.choose import Chosen, EngineName, choose_engine, engines_here, make_engine
from longstraw.pagers.engines.measure import Rates, measure
from longstraw.pagers.engines.protocol import Buffer, DeviceEngine, DiskEngine, EngineSettings

__all__ = [
    "Buffer",
    "Chosen",
    "DeviceEngine",
    "DiskEngine",
    "EngineName",
    "EngineSettings",
    "Rates",
    "choose_engine",
    "engines_here",
    "make_engine",
    "measure",
]
