"""Skips what this machine has no hardware for, and keeps every test offline and on few threads."""

from __future__ import annotations

import os

# Before torch or transformers is imported by any test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Triton's own functions read this when it is first imported: without a device its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {devices}"))
        elif item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
