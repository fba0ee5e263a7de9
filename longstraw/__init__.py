"""Longstraw: one long prompt, captured once, serves a whole group of responses, with the exact gradient."""

from longstraw.api import Runtime
from longstraw.config import Config
from longstraw.errors import LongstrawError
from longstraw.integrations.transformers.footprint import state_bytes
from longstraw.runtime.lane import Lane
from longstraw.runtime.report import Report
from longstraw.runtime.transaction import Transaction

__all__ = ["Config", "Lane", "LongstrawError", "Report", "Runtime", "Transaction", "state_bytes"]
__version__ = "0.1.0"
