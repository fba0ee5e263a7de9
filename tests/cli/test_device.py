"""--device: a device that is there, with its number."""

from __future__ import annotations

import pytest
import torch

from longstraw.cli.device import parse_device
from longstraw.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_the_cpu() -> None:
    assert parse_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_number(two_gpus: None, name: str, number: int) -> None:
    assert parse_device(name) == torch.device("cuda", number)


@pytest.mark.parametrize("name", ["cuda:2", "meta", "gpu"])
def test_what_is_not_there(two_gpus: None, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {name}"):
        parse_device(name)
