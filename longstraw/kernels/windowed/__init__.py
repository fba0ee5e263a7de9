"""Attention with a sliding window: packed branches over the last prompt rows and over each branch's own rows."""

from longstraw.kernels.windowed.attention import WindowState, keep_window_only, windowed_attention
from longstraw.kernels.windowed.ops import WindowOps, choose_window_ops
from longstraw.kernels.windowed.slide import Slide

__all__ = ["Slide", "WindowOps", "WindowState", "choose_window_ops", "keep_window_only", "windowed_attention"]
