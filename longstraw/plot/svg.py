"""The few SVG shapes that plots here are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Colours that people with colour blindness tell apart (Paul Tol's bright scheme)."""


class Canvas:
    """An SVG picture of `width` x `height` pixels, from the top left."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, *, tip: str = "") -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}">'
            f"{title}</rect>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def finish(self) -> str:
        """The picture as text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"
