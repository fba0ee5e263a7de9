"""The meter sees memory that was held and let go, and does not see the last measurement's."""

from __future__ import annotations

import pytest
import torch

from longstraw.demo import peak
from longstraw.demo.peak import KERNEL, SAMPLED, PeakMemory

MIB = 2**20


def hold(mib: int) -> None:
    torch.ones(mib * MIB, dtype=torch.uint8).add_(1)


@pytest.mark.parametrize("method", [KERNEL, SAMPLED])
def test_sees_what_was_held(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    if method == SAMPLED:
        monkeypatch.setattr(peak, "_can_reset_mark", lambda: False)
    elif not peak._can_reset_mark():
        pytest.skip("the kernel's mark cannot be reset here")
    with PeakMemory(torch.device("cpu")) as first:
        hold(256)
    assert first.method == method
    assert 250 * MIB < first.added_bytes < 320 * MIB
    with PeakMemory(torch.device("cpu")) as second:
        hold(16)
    assert second.added_bytes < 100 * MIB


@pytest.mark.gpu
def test_sees_what_was_held_on_a_gpu() -> None:
    device = torch.device("cuda")
    with PeakMemory(device) as found:
        torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    assert found.added_bytes == 256 * MIB
