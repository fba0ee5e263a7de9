"""The demo: a real model on real text, with a checkable reward, and the ordinary step beside it."""

from longstraw.demo.options import DemoOptions
from longstraw.demo.results import Comparison, DemoResult, StepResult
from longstraw.demo.run import run_demo

__all__ = ["Comparison", "DemoOptions", "DemoResult", "StepResult", "run_demo"]
