"""A transaction as a picture: time by phase, device memory pass by pass, bytes moved, and pages by tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longstraw.config.sizes import approximate_bytes
from longstraw.plot.svg import PALETTE, Canvas

PHASES = ("capture", "score", "replay", "backward", "sweep", "finalize")
_WIDTH, _LEFT, _RIGHT = 900, 150, 40
_SPAN = _WIDTH - _LEFT - _RIGHT
_STALL = "#222222"


def transaction_svg(report: Mapping[str, Any]) -> str:
    """The picture of a report's figures (`Report.to_dict`).

    Bars of phases carry a dark part: what they waited for pages. Passes are bars of device memory over time, in their
    phase's colour; without a CUDA device there are none.
    """
    passes: list[Mapping[str, Any]] = report["passes"]
    tiers = sorted({*report["bytes_read"], *report["bytes_written"], *report["tier_bytes"]})
    phases = [name for name in PHASES if name in report["seconds"]]
    canvas = Canvas(_WIDTH, 560 + 22 * (len(phases) + len(tiers)))
    title = f"{report['gradient']} gradient, prompt {report['prompt_tokens']:,}, {report['branches']} responses"
    canvas.text(20, 28, f"{title}, {sum(report['seconds'].values()):.2f} s", size=15, bold=True)
    y = _bars(canvas, 60, "seconds by phase (dark: waits for pages)", _phase_rows(report, phases), "{:.2f} s".format)
    y = _bars(canvas, y + 30, "pages by tier", _tier_rows(report, tiers), approximate_bytes)
    end = max((one["seconds"] for one in passes), default=1.0) or 1.0
    y = _memory(canvas, y + 30, passes, end)
    _moved(canvas, y + 40, passes, tiers, end)
    return canvas.finish()


_Row = tuple[str, float, float, str]
"""Name, value, its dark part, colour."""


def _phase_rows(report: Mapping[str, Any], phases: list[str]) -> list[_Row]:
    return [(name, report["seconds"][name], report["stall_seconds"].get(name, 0.0), _colour(name)) for name in phases]


def _tier_rows(report: Mapping[str, Any], tiers: list[str]) -> list[_Row]:
    return [(name, report["tier_bytes"].get(name, 0), 0.0, PALETTE[i % len(PALETTE)]) for i, name in enumerate(tiers)]


def _colour(phase: str) -> str:
    return PALETTE[PHASES.index(phase)] if phase in PHASES else PALETTE[-1]


def _bars(canvas: Canvas, y: float, title: str, rows: list[_Row], label: Callable[[float], str]) -> float:
    canvas.text(20, y, title, bold=True)
    longest = max((value for _, value, _, _ in rows), default=0) or 1
    for name, value, dark, colour in rows:
        y += 22
        length = value / longest * (_SPAN - 90)
        canvas.text(_LEFT - 8, y + 4, name, anchor="end")
        canvas.box(_LEFT, y - 8, length, 16, colour, tip=f"{name}: {label(value)}")
        if dark > 0:
            canvas.box(_LEFT, y - 8, min(dark, value) / longest * (_SPAN - 90), 5, _STALL, tip=f"waits: {label(dark)}")
        canvas.text(_LEFT + length + 6, y + 4, label(value))
    return y + 12


def _memory(canvas: Canvas, y: float, passes: list[Mapping[str, Any]], end: float) -> float:
    highest = max((one["peak_device_bytes"] for one in passes), default=0)
    canvas.text(20, y, "peak of device memory, pass by pass" if highest else "passes over time", bold=True)
    height, before = 140.0, 0.0
    bottom = y + 12 + height
    for one in passes:
        left, right = _at(before, end), _at(one["seconds"], end)
        share = one["peak_device_bytes"] / highest if highest else 0.5
        tip = f"{one['phase']}, {one['seconds']:.2f} s, {approximate_bytes(one['peak_device_bytes'])}"
        canvas.box(left, bottom - height * share, right - left - 0.5, height * share, _colour(one["phase"]), tip=tip)
        before = one["seconds"]
    if highest:
        canvas.text(_LEFT - 8, y + 22, approximate_bytes(highest), anchor="end")
    _axis(canvas, bottom, end)
    return bottom + 18


def _moved(canvas: Canvas, y: float, passes: list[Mapping[str, Any]], tiers: list[str], end: float) -> None:
    canvas.text(20, y, "bytes moved so far", bold=True)
    lines = []
    for number, tier in enumerate(tiers):
        for way in ("read", "written"):
            total, points = 0, [(0.0, 0)]
            for one in passes:
                total += one[way].get(tier, 0)
                points.append((one["seconds"], total))
            if total:
                lines.append((f"{tier} {way}", PALETTE[(2 * number + (way == "written")) % len(PALETTE)], points))
    highest = max((points[-1][1] for _, _, points in lines), default=1)
    height = 120.0
    bottom = y + 12 + height
    for number, (name, colour, points) in enumerate(lines):
        canvas.line([(_at(x, end), bottom - height * value / highest) for x, value in points], colour)
        canvas.box(_LEFT + 10, y + 18 + 16 * number, 12, 3, colour)
        canvas.text(_LEFT + 28, y + 24 + 16 * number, f"{name}: {approximate_bytes(points[-1][1])}")
    _axis(canvas, bottom, end)


def _at(seconds: float, end: float) -> float:
    return _LEFT + seconds / end * _SPAN


def _axis(canvas: Canvas, y: float, end: float) -> None:
    canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], "#555555", width=1)
    for part in range(5):
        canvas.text(_at(end * part / 4, end), y + 15, f"{end * part / 4:.3g} s", anchor="middle", size=10)
