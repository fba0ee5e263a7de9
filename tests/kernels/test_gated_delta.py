"""The chunked gated delta rule and the windowed convolution against their oracles, values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstraw.errors import KernelMismatchError, UnsupportedModelError
from longstraw.kernels.gated_delta import causal_conv, choose_rule, last_rows
from longstraw.kernels.gated_delta import chunked as chunked_module
from longstraw.kernels.gated_delta.check import check_rule
from longstraw.kernels.gated_delta.chunked import ChunkedRule
from longstraw.kernels.gated_delta.fla import refusal
from longstraw.kernels.gated_delta.naive import naive_delta_rule

HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 6, 5


def inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0, per_channel: bool = False) -> list[Tensor]:
    """q, k, v, g, beta and an initial state, all with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = [
        noise(tokens, HEADS, K_DIM),
        noise(tokens, HEADS, K_DIM),
        noise(tokens, V_HEADS, V_DIM),
        -noise(tokens, V_HEADS, *((K_DIM,) if per_channel else ())).abs() * 0.3,
        noise(tokens, V_HEADS).sigmoid(),
        noise(V_HEADS, K_DIM, V_DIM),
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def run(rule: object, tensors: list[Tensor], lengths: tuple[int, ...], use_initial: bool) -> list[Tensor]:
    """Outputs, final states and the gradients of every input under fixed weights."""
    *rows, initial = tensors
    out, final = rule(*rows, lengths=lengths, initial_VKD=initial if use_initial else None)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, final)]
    wanted = tensors if use_initial else rows
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    return [out, final, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("use_initial", [True, False])
@pytest.mark.parametrize("lengths", [(1,), (2, 1, 3), (64,), (65, 1, 128, 63, 130), (7, 200, 64)])
def test_chunked_is_the_oracle(lengths: tuple[int, ...], use_initial: bool, per_channel: bool) -> None:
    tensors = inputs(sum(lengths), per_channel=per_channel)
    for ours, theirs in zip(
        run(ChunkedRule(), tensors, lengths, use_initial),
        run(naive_delta_rule, tensors, lengths, use_initial),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_half_precision_is_computed_and_carried_in_float32() -> None:
    lengths = (70, 3)
    tensors = inputs(73, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    ours, theirs = (run(rule, x, lengths, True) for rule, x in ((ChunkedRule(), tensors), (naive_delta_rule, wide)))
    assert ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[1].double(), theirs[1], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert mine.dtype == torch.bfloat16
        # A bfloat16 has 8 significant bits; sums are not narrowed before the end.
        assert float((mine.double() - other).norm() / other.norm()) < 6e-3


def test_packed_branches_are_what_each_is_alone() -> None:
    lengths = (65, 1, 128, 2)
    tensors = [x.detach() for x in inputs(sum(lengths))]
    *rows, initial = tensors
    out, final = ChunkedRule()(*rows, lengths=lengths, initial_VKD=initial)
    for i, parts in enumerate(zip(*(x.split(lengths) for x in rows), strict=True)):
        alone, last = ChunkedRule()(*parts, lengths=(lengths[i],), initial_VKD=initial)
        torch.testing.assert_close(out.split(lengths)[i], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[i], last[0], rtol=1e-12, atol=1e-12)


def test_state_goes_on_over_a_cut() -> None:
    tensors = [x.detach() for x in inputs(150)]
    *rows, initial = tensors
    whole, end = ChunkedRule()(*rows, lengths=(150,), initial_VKD=initial)
    first, middle = ChunkedRule()(*(x[:37] for x in rows), lengths=(37,), initial_VKD=initial)
    second, last = ChunkedRule()(*(x[37:] for x in rows), lengths=(113,), initial_VKD=middle[0])
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(last, end, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("trained", range(6))
def test_gradients_of_one_input_alone(trained: int) -> None:
    lengths = (70, 3)
    tensors = [x.detach().requires_grad_(i == trained) for i, x in enumerate(inputs(73))]
    *rows, initial = tensors
    out, final = ChunkedRule()(*rows, lengths=lengths, initial_VKD=initial)
    # Outputs of one autograd function require gradients together; the final state's by the queries is 0.
    (ours,) = torch.autograd.grad(out.square().sum() + final.sum(), [tensors[trained]])
    out, final = naive_delta_rule(*rows, lengths=lengths, initial_VKD=initial)
    (theirs,) = torch.autograd.grad(out.square().sum() + final.sum(), [tensors[trained]])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_autograd_keeps_the_inputs_only() -> None:
    tensors = inputs(256, torch.float32)
    *rows, initial = tensors
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ChunkedRule()(*rows, lengths=(256,), initial_VKD=initial)
    assert sum(kept) == sum(x.untyped_storage().nbytes() for x in tensors)


def test_autocast_does_not_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    *rows, initial = [x.detach() for x in inputs(70, torch.float32)]
    expected, _ = ChunkedRule()(*rows, lengths=(70,), initial_VKD=initial)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ChunkedRule()(*rows, lengths=(70,), initial_VKD=initial)
        assert torch.equal(out, expected)
        narrowed, _ = chunked_module._chunked(*rows, initial, lengths=(70,))
    assert not torch.equal(narrowed, expected), "without the guard, autocast reaches the recurrence"


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("lengths", [(1,), (2, 1, 3, 4, 9)])
def test_convolution_sees_the_window_and_no_neighbour(lengths: tuple[int, ...], window: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    channels, kernel = 5, 4
    x, weight, bias, before = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((sum(lengths), channels), (channels, kernel), (channels,), (kernel - 1, channels))
    )
    out = causal_conv(x, before if window else None, weight, bias, lengths=lengths)
    history = before if window else torch.zeros_like(before)
    expected = torch.cat([
        torch.stack([
            (torch.cat([history, part])[t : t + kernel] * weight.t()).sum(0) + bias for t in range(len(part))
        ])
        for part in x.split(lengths)
    ])  # fmt: skip
    torch.testing.assert_close(out, expected)
    wanted = [x, weight, bias, before] if window else [x, weight, bias]
    for mine, other in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_of_branches_meet_in_the_windows_own_dtype() -> None:
    """A thousand branches each send 1 to the window; a sum in bfloat16 stops at 256."""
    before = torch.zeros(1, 1, requires_grad=True)
    x = torch.zeros(1000, 1, dtype=torch.bfloat16)
    out = causal_conv(x, before, torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16), None, lengths=(1,) * 1000)
    (grad,) = torch.autograd.grad(out.sum(), [before])
    assert grad.item() == 1000
    shared = before.bfloat16()
    (narrowed,) = torch.autograd.grad(torch.cat([shared] * 1000).sum(), [before])
    assert narrowed.item() < 1000, "narrowed once for all branches, their gradients would meet in bfloat16"


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_last_rows(tokens: int) -> None:
    x, before = torch.arange(100.0, 100 + tokens)[:, None], torch.tensor([[1.0], [2.0], [3.0]])
    assert torch.equal(last_rows(x, before, 3), torch.cat([before, x])[-3:])
    assert torch.equal(last_rows(x, None, 3), F.pad(x, (0, 0, 3, 0))[-3:])


def test_backend_is_chosen_by_device_and_dtype() -> None:
    assert choose_rule(torch.device("cpu"), torch.bfloat16).name == "torch"
    assert choose_rule(torch.device("cuda", 0), torch.float32).name == "torch"
    assert choose_rule(torch.device("cuda", 0), torch.bfloat16, "torch").name == "torch"
    with pytest.raises(UnsupportedModelError, match=r"kernels\.gated_delta is fla.*on cpu"):
        choose_rule(torch.device("cpu"), torch.bfloat16, "fla")


def test_the_torch_rule_takes_a_decay_per_channel() -> None:
    assert choose_rule(torch.device("cuda", 0), torch.bfloat16, "torch", per_channel=True).name == "torch"


@pytest.mark.parametrize("per_channel", [False, True])
def test_first_use_is_checked(per_channel: bool) -> None:
    """The check passes the torch rule in bfloat16, and refuses one whose gradient is wrong in a single input."""
    rule = ChunkedRule()
    q, v = torch.empty(9, 2, 16, dtype=torch.bfloat16), torch.empty(9, 4, 24, dtype=torch.bfloat16)
    check_rule(rule, "the torch rule", q, v, per_channel=per_channel)

    def half_a_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        return rule(q, k, v, g, (beta + beta.detach()) / 2, **rest)

    with pytest.raises(KernelMismatchError, match="gradient of beta differs"):
        check_rule(half_a_gradient, "another rule", q, v, per_channel=per_channel)


def test_the_check_is_hidden_from_who_measures_the_graph() -> None:
    """The model's first short run counts what autograd saves, and is where the check comes in."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    q, v = torch.empty(9, 2, 16, dtype=torch.bfloat16), torch.empty(9, 4, 24, dtype=torch.bfloat16)
    weight = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        check_rule(ChunkedRule(), "the torch rule", q, v, per_channel=False)
        assert not seen
        weight.square()
    assert len(seen) == 1, "the hooks of whoever called are back"


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_check_does_not_hang_on_defaults(default: torch.dtype) -> None:
    q, v = torch.empty(9, 2, 16, dtype=torch.bfloat16), torch.empty(9, 4, 24, dtype=torch.bfloat16)
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            check_rule(ChunkedRule(), "the torch rule", q, v, per_channel=False)
    finally:
        torch.set_default_dtype(torch.float32)


def test_missing_package_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longstraw.kernels.gated_delta.fla._version", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"not installed.*kernels\.gated_delta to torch"):
        choose_rule(torch.device("cuda", 3), torch.float16)


@pytest.mark.parametrize(
    ("triton", "hopper", "packages", "environment", "reason"),
    [
        ("3.3.1", True, (), {}, None),
        ("3.4.0", True, (), {}, "wrong gradients"),
        ("3.6.0", True, (), {}, "wrong gradients"),
        ("3.7.0+git", True, (), {}, "wrong gradients"),
        ("3.7.1", True, (), {}, None),
        ("3.6.0", False, (), {}, None),
        ("3.6.0", True, ("tilelang",), {}, None),
        ("3.6.0", True, ("tilelang",), {"FLA_TILELANG": "0"}, "wrong gradients"),
        ("3.6.0", True, ("tilelang",), {"FLA_DISABLE_BACKEND_DISPATCH": "1"}, "wrong gradients"),
        ("3.7.1", True, ("flash_qla",), {}, "flash_qla is installed"),
        ("3.7.1", True, ("flash_qla",), {"FLA_FLASH_QLA": "0"}, None),
        ("3.7.1", True, ("flash_qla",), {"FLA_DISABLE_BACKEND_DISPATCH": "1"}, None),
        ("3.7.1", True, ("flash_kda",), {}, "flash_kda is installed"),
        ("3.7.1", True, ("flash_kda",), {"FLA_FLASH_KDA": "0"}, None),
        ("3.7.1", True, (), {"FLA_INTRACARD_CP": "1"}, "FLA_INTRACARD_CP"),
    ],
)
def test_tool_chains_that_are_known_to_be_wrong(
    triton: str, hopper: bool, packages: tuple[str, ...], environment: dict[str, str], reason: str | None
) -> None:
    found = refusal(triton, hopper=hopper, installed=lambda name: name in packages, environment=environment)
    assert found is None if reason is None else reason in (found or "")
