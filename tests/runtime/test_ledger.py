"""The ledger: sums that lose no bits, `.grad` put back untouched, one collector at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longstraw.errors import TransactionStateError
from longstraw.runtime.ledger import GradientLedger, GradientSums, add_to_gradients

PASSES = 257
"""One more than the last whole number up to which bfloat16 counts by ones."""


def count(parameter: nn.Parameter, *, wide: bool) -> torch.Tensor:
    ledger = GradientLedger(wide=wide)
    ledger.begin([parameter])
    for _ in range(PASSES):
        parameter.sum().backward()
    return ledger.take()[parameter]


def test_257_gradients_of_one_make_257_in_bfloat16() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    total = count(parameter, wide=True)
    assert total.dtype == torch.float32
    assert total.tolist() == [257.0, 257.0]
    assert not parameter._post_accumulate_grad_hooks


def test_without_wide_sums_one_is_lost() -> None:
    assert count(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), wide=False).tolist() == [256.0, 256.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_parameters_sum_in_their_own_type(dtype: torch.dtype) -> None:
    total = count(nn.Parameter(torch.zeros(1, dtype=dtype)), wide=True)
    assert total.dtype == dtype
    assert total.item() == 257.0


def test_rounding_happens_once_at_the_end() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = GradientSums()
    for _ in range(3):
        # Each is 1 + 2**-9, which bfloat16 rounds to 1.
        sums.add({parameter: torch.tensor([1 + 2**-9])})
    parameter.grad = torch.tensor([2.0**-7], dtype=torch.bfloat16)
    before = parameter.grad
    sums.finalize()
    assert parameter.grad is before
    assert parameter.grad.item() == torch.tensor(3 + 3 * 2**-9 + 2**-7).bfloat16().item()


def test_sums_are_taken_once() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    sums = GradientSums()
    sums.add({parameter: torch.ones(1)})
    sums.finalize()
    sums.finalize()
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0


def test_an_empty_grad_is_filled_in_the_parameters_type() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    add_to_gradients({parameter: torch.ones(1)})
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("close", ["take", "rollback"])
def test_grad_is_the_same_tensor_afterwards(dtype: torch.dtype, close: str) -> None:
    first, second = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    first.grad = kept = torch.full((2,), 5.0, dtype=dtype)
    ledger = GradientLedger(wide=True)
    ledger.begin([first, second])
    assert first.grad is None
    (first * second).sum().backward()
    getattr(ledger, close)()
    assert first.grad is kept
    assert kept.tolist() == [5.0, 5.0]
    assert second.grad is None
    assert not ledger.begun


def test_discard_forgets_the_sums_and_stays_open() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
        ledger = GradientLedger(wide=True)
        ledger.begin([parameter])
        parameter.sum().backward()
        ledger.discard()
        (3 * parameter).sum().backward()
        assert ledger.take()[parameter].item() == 3.0


def test_what_a_framework_writes_without_a_hook_counts() -> None:
    summed, alone = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    ledger = GradientLedger(wide=True)
    ledger.begin([summed, alone])
    summed.sum().backward()
    for parameter in (summed, alone):
        parameter.grad = torch.full((1,), 2.0)
    sums = ledger.take()
    assert (sums[summed].item(), sums[alone].item()) == (3.0, 2.0)
    assert summed.grad is alone.grad is None


def test_a_parameter_without_a_gradient_in_a_pass_adds_nothing() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> None:
            return None

    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ledger = GradientLedger(wide=True)
    ledger.begin([parameter])
    parameter.sum().backward()
    Nothing.apply(parameter).backward()
    assert ledger.take()[parameter].item() == 1.0


def test_one_ledger_at_a_time_collects_for_a_parameter() -> None:
    shared, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first, second = GradientLedger(wide=True), GradientLedger(wide=True)
    first.begin([shared])
    with pytest.raises(TransactionStateError, match="another transaction"):
        second.begin([own, shared])
    assert not second.begun
    second.begin([own])
    second.rollback()
    first.rollback()
    second.begin([shared])
    second.rollback()


def test_a_ledger_that_was_dropped_stands_in_nobodys_way() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    dropped = GradientLedger(wide=True)
    dropped.begin([parameter])
    del dropped
    after = GradientLedger(wide=True)
    after.begin([parameter])
    after.rollback()


class NoMemory(torch.Tensor):
    """A gradient for whose sum there is no memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.Tensor.add_, torch.Tensor.to):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("filled", [True, False], ids=["with a .grad", "without a .grad"])
def test_running_out_of_memory_on_delivery_changes_no_grad(filled: bool) -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    first.grad = torch.full((2,), 3.0)
    if filled:
        second.grad = torch.full((2,), 5.0)
    with pytest.raises(torch.OutOfMemoryError):
        add_to_gradients({first: torch.ones(2), second: torch.ones(2).as_subclass(NoMemory)})
    assert first.grad.tolist() == [3.0, 3.0]
    assert second.grad is None if not filled else second.grad.tolist() == [5.0, 5.0]


def test_sums_that_an_error_cut_short_are_never_taken() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    sums = GradientSums()
    sums.add({first: torch.ones(1), second: torch.ones(1).as_subclass(NoMemory)})
    with pytest.raises(torch.OutOfMemoryError):
        sums.add({first: torch.ones(1), second: torch.ones(1)})
    with pytest.raises(TransactionStateError, match="interrupted the end of a transaction"):
        sums.take()
    assert first.grad is None
