"""Index tensors are made once, and never in a form that a later caller cannot use."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw.kernels import indices
from longstraw.kernels.indices import branch_edges, index_tensor

CPU = torch.device("cpu")


def test_values_and_dtype() -> None:
    edges = branch_edges((3, 1, 4), CPU)
    assert edges.dtype == torch.int32
    assert edges.tolist() == [0, 3, 4, 8]


def test_the_same_tensor_again() -> None:
    assert index_tensor((7, 8, 9), CPU) is index_tensor((7, 8, 9), CPU)
    assert index_tensor((7, 8, 9), CPU) is not index_tensor((7, 8, 9), CPU, torch.int32)


def test_a_tensor_without_memory_is_not_kept() -> None:
    with FakeTensorMode():
        index_tensor((11, 12), CPU)
    assert type(index_tensor((11, 12), CPU)) is torch.Tensor


def test_a_tensor_of_inference_mode_is_not_kept() -> None:
    with torch.inference_mode():
        index_tensor((13, 14), CPU)
    assert not index_tensor((13, 14), CPU).is_inference()


def test_the_oldest_go() -> None:
    for value in range(200):
        index_tensor((1000, value), CPU)
    assert len(indices._made) <= indices._MOST
