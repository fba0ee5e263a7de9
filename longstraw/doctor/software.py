"""Versions: of Python and what Longstraw stands on, those known to be wrong, and what the optional parts need."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from longstraw.doctor.finding import Finding, bad, good, note
from longstraw.errors import UnsupportedModelError
from longstraw.kernels.gated_delta.choose import choose_rule
from longstraw.pagers.engines.deepspeed import is_built, unreadable_archs
from longstraw.pagers.engines.kvikio import DRIVER
from longstraw.pagers.engines.trial import NO_PGETEVENTS, lacks_pgetevents

_TORCH = ((2, 11), (2, 14))
_PYTHON = ((3, 11), (3, 13))
_OPTIONAL = {
    "cupy": ("cupy-cuda13x", "parallel pinning goes through torch instead", "pip install 'longstraw[cuda]'"),
    "pynvml": ("nvidia-ml-py", "memory is not bound to the GPU's node", "pip install 'longstraw[cuda]'"),
    "kvikio": ("kvikio-cu13", "engine kvikio is not there", "pip install kvikio-cu13"),
    "deepspeed": ("deepspeed", "engine deepspeed and ZeRO are not there", "pip install 'longstraw[deepspeed]'"),
}


def examine_software() -> list[Finding]:
    """Findings on versions."""
    names = ("longstraw", "torch", "transformers", "accelerate", "xxhash")
    found = [good("versions", f"Python {platform.python_version()}, " + ", ".join(f"{n} {_version(n)}" for n in names))]
    if not _PYTHON[0] <= sys.version_info[:2] < _PYTHON[1]:
        found.append(bad("versions", f"Python {platform.python_version()} was never tested", "use 3.11 or 3.12"))
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not _TORCH[0] <= release < _TORCH[1]:
        found.append(bad("versions", f"torch {torch.__version__} was never tested", "use torch 2.11, 2.12 or 2.13"))
    for module, (package, loss, fix) in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            found.append(note("versions", f"{package} is not installed: {loss}", fix))
        else:
            found.append(good("versions", f"{package} {_version(package)}"))
    found.append(_gated_delta())
    return [*found, _libaio(), _async_io(), _gds()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # cupy and kvikio carry the CUDA version in their distribution's name.
        return "of another distribution name" if importlib.util.find_spec(package.split("-")[0]) else "missing"


def _gated_delta() -> Finding:
    """flash-linear-attention with some triton releases gives wrong gradients; the kernel knows which."""
    if not torch.cuda.is_available() or importlib.util.find_spec("fla") is None:
        return good("versions", "flash-linear-attention is not used here")
    try:
        choose_rule(torch.device("cuda", 0), torch.bfloat16, "fla")
    except UnsupportedModelError as refusal:
        return bad("versions", str(refusal), "set kernels.gated_delta to torch, or install other versions")
    return good("versions", "flash-linear-attention with this triton is not known to be wrong")


def _libaio() -> Finding:
    if ctypes.util.find_library("aio"):
        return good("libaio", "is installed")
    return note("libaio", "is not installed: engine deepspeed cannot be built", "apt install libaio-dev")


def _async_io() -> Finding:
    """DeepSpeed's op for files: of engine deepspeed, and of ZeRO's offload to a disk."""
    if importlib.util.find_spec("deepspeed") is None:
        return note("async_io", "DeepSpeed is not installed", "pip install 'longstraw[deepspeed]'")
    if is_built() and lacks_pgetevents():
        return note(
            "async_io",
            f"DeepSpeed's async_io is built, but {NO_PGETEVENTS}: it aborts every process that uses it",
            "leave engine to auto or posix, and ZeRO's offload to device: cpu",
        )
    if is_built():
        return good("async_io", "DeepSpeed's async_io is built: ZeRO can offload to a disk")
    missing = [name for name, there in (("g++", shutil.which("g++")), ("libaio.h", _has_headers())) if not there]
    if missing:
        return note(
            "async_io",
            f"DeepSpeed's async_io is not built, and cannot be: {' and '.join(missing)} missing. ZeRO's offload to a "
            "disk (device: nvme) and engine deepspeed are not there",
            "apt install g++ libaio-dev",
        )
    build = "python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()'"
    if archs := unreadable_archs():
        return note(
            "async_io",
            f"DeepSpeed's async_io is not built, and its builder cannot read {archs} in TORCH_CUDA_ARCH_LIST",
            f"env -u TORCH_CUDA_ARCH_LIST {build}",
        )
    return note(
        "async_io", "DeepSpeed's async_io is not built yet; its first use compiles it, which takes minutes", build
    )


def _has_headers() -> bool:
    folders = [Path("/usr/include"), Path("/usr/local/include"), Path(sys.prefix) / "include"]
    named = [Path(flag[2:]) for flag in os.environ.get("CFLAGS", "").split() if flag.startswith("-I")]
    return any((folder / "libaio.h").exists() for folder in [*folders, *named])


def _gds() -> Finding:
    if DRIVER.exists():
        return good("gds", "the kernel module nvidia-fs is loaded")
    return note(
        "gds",
        "the kernel module nvidia-fs is not loaded: kvikio passes through host memory",
        "install nvidia-gds, or leave it: posix needs none",
    )
