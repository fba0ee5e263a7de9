"""A report printed: what a person looks for first, and nothing that did not happen."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from longstraw import Report, Runtime
from tests.parity.models import SMALL, build, make_group, replay_group


def test_a_printed_report_names_phases_tiers_and_what_went_wrong() -> None:
    report = Report(
        prompt_tokens=100, response_tokens=12, branches=3, chunks=2, lanes=1, seconds={"capture": 1.25, "sweep": 3.0},
        tier_bytes={"host": 3 << 20}, retries=2, stale_steps=1, drift_mean=0.014, drift_max=0.5, left_out=4,
    )  # fmt: skip
    text = str(report)
    for part in (
        "exact gradient: 100 prompt tokens",
        "capture 1.25 s",
        "sweep 3.00 s",
        "host",
        "2 time(s)",
        "4 more branch",
        "0.014",
    ):
        assert part in text
    assert "peak device memory" not in text


@pytest.mark.parametrize("traced", [False, True])
def test_a_report_travels_to_other_processes(tmp_path: Path, traced: bool) -> None:
    group = make_group(30, (4, 1))
    runtime = Runtime(build(), SMALL, trace=str(tmp_path / "trace.json") if traced else None)
    with runtime.transaction(group.prompt) as txn:
        begun = pickle.loads(pickle.dumps(txn.report))
        replay_group(txn, group)
    assert begun.prompt_tokens == 30
    for found in (pickle.loads(pickle.dumps(txn.report)), copy.deepcopy(txn.report)):
        assert found.to_dict() == txn.report.to_dict()
        assert found == txn.report
        assert str(found) == str(txn.report)


def test_an_untroubled_report_is_three_lines() -> None:
    assert len(str(Report()).splitlines()) == 3


def test_the_auxiliary_loss_has_a_line_and_says_what_has_no_gradient() -> None:
    figures = {"aux_loss": 2.04, "aux_loss_prompt_weight": 8}
    exact, unused = str(Report(**figures, aux_loss_scale=0.001)), str(Report(**figures))
    detached = str(Report(**figures, aux_loss_scale=0.001, gradient="detached"))
    assert exact.endswith("auxiliary loss: 2.04 with coefficient 0.001, each prompt token counted 8 time(s)")
    assert "no loss asked for its gradient" in unused
    assert "no gradient through the prompt's share" in detached
