"""Which NUMA node is next to a GPU, and binding a range of host memory to a node."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.errors import ConfigError
from longstraw.pagers.limits import numa_nodes
from longstraw.resident.placement import format_bytes

_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the mbind system call; the C library has no function for it, and libnuma is often missing."""
_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The node that memory is bound to, or None, and why that one. `asked`: the user named it, so it is not lifted."""

    node: int | None
    why: str
    asked: bool = False


UNBOUND = Binding(node=None, why="numa: off")


def choose_node(wish: Literal["auto", "off"] | int, device: torch.device) -> Binding:
    """The node for `tiers[i].numa`.

    Raises ConfigError if a node is named that the machine has not.
    """
    if wish == "off":
        return UNBOUND
    nodes = numa_nodes()
    if wish != "auto":
        if wish not in nodes:
            known = ", ".join(map(str, nodes)) or "none"
            raise ConfigError(f"tiers[i].numa: {wish} is no node with memory here (there are: {known}); write auto")
        return Binding(node=wish, why="as asked", asked=True)
    if device.type != "cuda":
        return Binding(node=None, why="no GPU to be near to")
    if len(nodes) < 2:
        return Binding(node=None, why="the machine has one node")
    return _next_to(device, nodes)


def _next_to(device: torch.device, nodes: dict[int, int]) -> Binding:
    if importlib.util.find_spec("pynvml") is None:
        return Binding(node=None, why="NVML cannot be asked: pip install 'longstraw[cuda]'")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as refusal:
        return Binding(node=None, why=f"NVML cannot be asked ({refusal})")
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        words = max(nodes) // _BITS + 1
        masks = pynvml.nvmlDeviceGetMemoryAffinity(handle, words, pynvml.NVML_AFFINITY_SCOPE_NODE)
    except pynvml.NVMLError as refusal:
        return Binding(node=None, why=f"NVML does not tell the GPU's node ({refusal})")
    finally:
        pynvml.nvmlShutdown()
    near = [node for node in nodes if int(masks[node // _BITS]) >> (node % _BITS) & 1]
    if len(near) != 1:
        return Binding(node=None, why=f"NVML names nodes {near} as near to the GPU")
    return Binding(node=near[0], why="next to the GPU, says NVML")


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind `nbytes` bytes at `address` (page-aligned, not yet touched) to a node.

    Raises OSError if the node has not so much left, or the kernel or the container refuses.
    """
    free = numa_nodes().get(node, 0)
    if free < nbytes:
        raise OSError(errno.ENOMEM, f"NUMA node {node} has {format_bytes(free)} left, not {format_bytes(nbytes)}")
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    status = libc.syscall(
        number,
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(len(mask) * _BITS + 1),
        ctypes.c_uint(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to node {node}: {os.strerror(code)}")
