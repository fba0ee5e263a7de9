"""The picture of a transaction: well-formed, and as long as the figures say."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from longstraw.plot import transaction_svg
from longstraw.plot.svg import Canvas
from longstraw.runtime.report import Report

SVG = "{http://www.w3.org/2000/svg}"


def figures(**changes: Any) -> dict[str, Any]:
    report = Report(
        prompt_tokens=1000,
        branches=4,
        seconds={"capture": 1.0, "sweep": 4.0},
        stall_seconds={"sweep": 1.0},
        bytes_read={"host": 300, "nvme": 5},
        bytes_written={"host": 100},
        tier_bytes={"host": 1 << 30, "nvme": 1 << 20},
        passes=[
            {
                "phase": phase,
                "seconds": at,
                "peak_device_bytes": peak,
                "read": {"host": 150},
                "written": {"host": 50},
            }
            for phase, at, peak in (("capture", 1.0, 1 << 20), ("sweep", 5.0, 1 << 21))
        ],
    )
    return report.to_dict() | changes


def boxes(picture: str) -> dict[str, float]:
    """Widths of boxes by their tip."""
    found = {}
    for box in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        tip = box.find(f"{SVG}title")
        if tip is not None:
            found[str(tip.text)] = float(box.attrib["width"])
    return found


def test_bars_are_as_long_as_their_seconds() -> None:
    found = boxes(transaction_svg(figures()))
    assert found["sweep: 4.00 s"] == pytest.approx(4 * found["capture: 1.00 s"])
    assert found["waits: 1.00 s"] == pytest.approx(found["capture: 1.00 s"])
    # The second pass ends at 5 s and began at 1.
    assert found["sweep, 5.00 s, 2 MiB"] == pytest.approx(4 * found["capture, 1.00 s, 1 MiB"], rel=0.02)


def test_what_was_moved_is_told() -> None:
    words = [text.text for text in ElementTree.fromstring(transaction_svg(figures())).iter(f"{SVG}text")]
    assert "host read: 300 B" in words
    assert "host written: 100 B" in words


def test_a_report_of_nothing_is_drawn_too() -> None:
    ElementTree.fromstring(transaction_svg(Report().to_dict()))


def test_words_are_escaped() -> None:
    canvas = Canvas(10, 10)
    canvas.text(0, 0, "<a & b>")
    assert "<a & b>" in [text.text for text in ElementTree.fromstring(canvas.finish()).iter(f"{SVG}text")]
