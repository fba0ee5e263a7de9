"""flash-linear-attention's Triton kernels for the gated delta rule, and the tool chains in which they are wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw.errors import UnsupportedModelError
from longstraw.kernels.gated_delta.check import check_rule
from longstraw.kernels.indices import branch_edges

OLDEST = (0, 6)
"""Grouped value heads, and gradients of the initial state with packed rows, were checked from this version on."""

# flash-linear-attention's own finding (its issue 640): the gradient kernel is wrong on Hopper in these versions.
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
_USE_TORCH = "or set kernels.gated_delta to torch, which is slower"


class FlaRule:
    """`DeltaRule` through `fla.ops`. Inputs float16 or bfloat16, sums and states in float32.

    With one decay a head it is the gated delta rule, with one for each channel of the keys Kimi delta attention.

    Raises UnsupportedModelError when made, if the package is missing or too old, if the tool chain is known to give
    wrong gradients, or if the package would hand the work to another backend that happens to be installed. Its first
    call for each shape of heads is compared with the oracle, and raises KernelMismatchError if they differ.
    """

    def __init__(self, device: torch.device, *, per_channel: bool = False) -> None:
        version = _version("fla-core")
        if version is None:
            raise UnsupportedModelError(
                "the gated delta rule on a GPU needs flash-linear-attention, which is not installed: "
                f"pip install flash-linear-attention, {_USE_TORCH}"
            )
        if _numbers(version)[:2] < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UnsupportedModelError(
                f"flash-linear-attention {version} is too old; install {oldest} or newer, {_USE_TORCH}"
            )
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        triton = _version("triton") or "0"
        reason = refusal(triton, hopper=hopper, installed=_installed, environment=os.environ)
        if reason is not None:
            raise UnsupportedModelError(f"{reason}, {_USE_TORCH}")
        module = importlib.import_module("fla.ops.kda" if per_channel else "fla.ops.gated_delta_rule")
        self._function: Callable[..., Any] = module.chunk_kda if per_channel else module.chunk_gated_delta_rule
        self._per_channel = per_channel
        self._checked: set[tuple[torch.Size, torch.Size, torch.dtype]] = set()
        self.name = f"fla {version} (triton {triton})"

    def __call__(
        self,
        q_SHK: Tensor,
        k_SHK: Tensor,
        v_SVD: Tensor,
        g_SV: Tensor,
        beta_SV: Tensor,
        *,
        lengths: Sequence[int],
        initial_VKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        shapes = q_SHK.shape[1:], v_SVD.shape[1:], v_SVD.dtype
        if shapes not in self._checked:
            check_rule(self._run, self.name, q_SHK, v_SVD, per_channel=self._per_channel)
            self._checked.add(shapes)
        return self._run(q_SHK, k_SHK, v_SVD, g_SV, beta_SV, lengths=lengths, initial_VKD=initial_VKD)

    def _run(
        self,
        q_SHK: Tensor,
        k_SHK: Tensor,
        v_SVD: Tensor,
        g_SV: Tensor,
        beta_SV: Tensor,
        *,
        lengths: Sequence[int],
        initial_VKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        initial = None
        if initial_VKD is not None:
            initial = initial_VKD.float().expand(len(lengths), *initial_VKD.shape).contiguous()
        out, final = self._function(
            q_SHK[None], k_SHK[None], v_SVD[None], g=g_SV[None].float(), beta=beta_SV[None],
            initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=branch_edges(tuple(lengths), v_SVD.device, torch.int64),
            # Without it the package asks the device, and the host waits.
            cu_seqlens_cpu=branch_edges(tuple(lengths), torch.device("cpu"), torch.int64),
        )  # fmt: skip
        return out[0], final

    def workspace_bytes(
        self, num_v_heads: int, k_dim: int, v_dim: int, element: int, *, per_channel: bool = False
    ) -> int:
        """Bytes a token that a backward needs for a moment."""
        return fla_workspace_bytes(num_v_heads, k_dim, v_dim, element)


def fla_workspace_bytes(num_v_heads: int, k_dim: int, v_dim: int, element: int) -> int:
    """Bytes a token that a backward needs for a moment: keys, values and their gradients, and a state a chunk.

    `element` is the bytes of a value of the inputs. The package need not be installed.
    """
    return num_v_heads * (8 * element * (k_dim + v_dim) + 4 * element * k_dim * v_dim // 64)


def refusal(
    triton: str, *, hopper: bool, installed: Callable[[str], bool], environment: os._Environ[str] | dict[str, str]
) -> str | None:
    """Why flash-linear-attention would give wrong gradients, or not run its own kernels; None if it would do neither.

    Args:
        triton: its version.
        hopper: whether the GPU is of compute capability 9.
        installed: whether a package of that import name can be found.
        environment: the process's variables.
    """
    if environment.get("FLA_DISABLE_BACKEND_DISPATCH") != "1":
        if installed("flash_qla") and environment.get("FLA_FLASH_QLA", "1") != "0":
            return (
                "flash_qla is installed, and flash-linear-attention would silently use it instead of its own kernels: "
                "set FLA_FLASH_QLA=0"
            )
        if installed("flash_kda") and environment.get("FLA_FLASH_KDA", "1") != "0":
            return (
                "flash_kda is installed, and flash-linear-attention could silently use it instead of its own kernels: "
                "set FLA_FLASH_KDA=0"
            )
        for name in ("FLA_INTRACARD_CP", "FLA_GLUON", "FLA_FLASH_QLA"):
            if environment.get(name, "0") != "0":
                return f"{name} makes flash-linear-attention use another backend: unset it"
    lowest, fixed = _WRONG_ON_HOPPER
    if hopper and lowest <= _numbers(triton) < fixed and not _tilelang(installed, environment):
        return (
            f"triton {triton} gives wrong gradients of the gated delta rule on Hopper GPUs (flash-linear-attention "
            f"issue 640): install triton {'.'.join(map(str, fixed))} or newer, or tilelang"
        )
    return None


def _tilelang(installed: Callable[[str], bool], environment: os._Environ[str] | dict[str, str]) -> bool:
    """Whether the kernel in question runs in tilelang instead, which is flash-linear-attention's own remedy."""
    off = environment.get("FLA_DISABLE_BACKEND_DISPATCH") == "1" or environment.get("FLA_TILELANG", "1") == "0"
    return installed("tilelang") and not off


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        numbers.append(int(digits or 0))
    return tuple(numbers)
