"""The GPUs: what torch and NVML see, the driver, each one's link and NUMA node."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from longstraw.doctor.finding import Finding, good, note
from longstraw.pagers.limits import numa_nodes
from longstraw.pagers.numa import choose_node
from longstraw.resident.placement import format_bytes


def examine_gpus() -> list[Finding]:
    """One finding for each GPU and its link; one for all if there is none."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            text = f"torch {torch.__version__} is built without CUDA"
            return [note("gpu", text, "for a GPU, install torch with CUDA")]
        return [note("gpu", "torch sees no GPU", "run nvidia-smi; check the driver, and CUDA_VISIBLE_DEVICES")]
    if importlib.util.find_spec("pynvml") is None:
        return [note("gpu", "NVML cannot be asked for links and nodes", "pip install 'longstraw[cuda]'")]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as refusal:
        return [note("gpu", f"NVML cannot be asked ({refusal})", "run nvidia-smi; give the container libnvidia-ml")]
    try:
        found = [good("gpu", f"driver {pynvml.nvmlSystemGetDriverVersion()}, CUDA {torch.version.cuda} in torch")]
        for index in range(torch.cuda.device_count()):
            found += _examine_one(pynvml, index)
        return found
    finally:
        pynvml.nvmlShutdown()


def _examine_one(nvml: Any, index: int) -> list[Finding]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = [good("gpu", f"cuda:{index} {properties.name}: {format_bytes(free)} of {format_bytes(total)} free")]
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        found.append(_link(nvml, handle, index))
    except nvml.NVMLError as refusal:
        found.append(note("link", f"cuda:{index}: NVML does not tell its link ({refusal})", "measure: longstraw probe"))
    found.append(_node(index))
    return found


def _link(nvml: Any, handle: Any, index: int) -> Finding:
    generation, width = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    now = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    text = f"cuda:{index}: PCIe {generation} x{width}"
    # The generation drops when the GPU idles; the width does not.
    if now < width:
        return note("link", f"{text}, running at x{now}", "reseat the card or look at the slot's wiring (lspci -vv)")
    return good("link", text)


def _node(index: int) -> Finding:
    binding = choose_node("auto", torch.device("cuda", index))
    if binding.node is not None:
        return good("numa", f"cuda:{index} is next to node {binding.node}")
    if len(numa_nodes()) < 2:
        return good("numa", f"cuda:{index}: {binding.why}")
    return note("numa", f"cuda:{index}: {binding.why}", "look at nvidia-smi topo -m and set tiers[].numa to the node")
