"""Host memory: what is free, what a container allows, what may be locked, and the NUMA nodes."""

from __future__ import annotations

import psutil

from longstraw.doctor.finding import Finding, bad, good, note
from longstraw.pagers import limits
from longstraw.pagers.installed import hot_add, uncounted_bytes
from longstraw.resident.placement import format_bytes

_SMALL = 2 << 30


def examine_memory() -> list[Finding]:
    """Findings on host memory."""
    machine = psutil.virtual_memory()
    free = limits.free_host_bytes()
    found = [good("memory", f"{format_bytes(machine.available)} of {format_bytes(machine.total)} available")]
    more, source = uncounted_bytes(machine.total), hot_add()
    if more:
        text = f"{format_bytes(more)} more are online; the kernel counts them as they are first used, budgets do now"
        found.append(good("memory", text))
    if source is not None:
        text = f"{source} may add memory while the machine runs: budgets above what it has now are not refused"
        found.append(note("memory", text, "give the host tier a budget: auto takes from what is there now"))
    for folder, limit, used in limits.cgroup_limits():
        found.append(good("memory", f"container limit {format_bytes(limit)}, {format_bytes(used)} used ({folder})"))
    if free < _SMALL:
        found.append(
            bad("memory", f"only {format_bytes(free)} may be taken", "end other programs, or raise the container limit")
        )
    found.append(_locked())
    nodes = limits.numa_nodes()
    listed = ", ".join(f"node {node} with {format_bytes(size)} left" for node, size in nodes.items())
    found.append(good("numa", listed or "the kernel shows no NUMA nodes"))
    swap = psutil.swap_memory()
    if swap.total and swap.percent > 50:
        found.append(note("memory", f"{swap.percent:.0f}% of the swap is used", "end other programs, or lower budgets"))
    return found


def _locked() -> Finding:
    limit = limits.locked_limit()
    if limit is None:
        return good("memlock", "locked memory is not limited")
    return note(
        "memlock",
        f"`ulimit -l` allows {format_bytes(limit)}; CUDA's driver mostly locks beyond it, DeepSpeed's pinning does not",
        "ulimit -l unlimited, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for the container",
    )
