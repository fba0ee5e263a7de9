"""What the machine and the container let this process have: host memory, locked memory, a node's memory."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import psutil

from longstraw.errors import CapacityError
from longstraw.pagers.installed import uncounted_bytes
from longstraw.resident.placement import format_bytes

CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_CAP_IPC_LOCK = 14
_MAP_LOCKED = 0x2000


def free_host_bytes() -> int:
    """Bytes that this process may still take from the host, the limits of its container included."""
    machine = psutil.virtual_memory()
    free = machine.available + uncounted_bytes(machine.total)
    for _, limit, used in cgroup_limits():
        free = min(free, limit - used)
    return max(free, 0)


def total_host_bytes() -> int:
    """The most that this process could ever have: the machine's memory, or the least of its containers' limits."""
    return min([machine_bytes(), *(limit for _, limit, _ in cgroup_limits())])


def machine_bytes() -> int:
    """The machine's memory, with what its kernel counts only as it is used."""
    total = psutil.virtual_memory().total
    return total + uncounted_bytes(total)


def cgroup_limits() -> list[tuple[Path, int, int]]:
    """Each control group above this process that limits memory: its folder, the limit, and the bytes that count.

    Page cache that the kernel would drop first does not count as used. Both versions of the interface are read.
    """
    found = []
    for folder in _groups():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            # Version 1 writes "no limit" as a number near 2 ** 63.
            if limit is not None and used is not None and limit < 1 << 60:
                found.append((folder, limit, max(used - _cache(folder), 0)))
    return found


def _groups() -> list[Path]:
    """The memory control group of this process and those above it, as far as they are mounted here."""
    listing = Path("/proc/self/cgroup")
    groups = [CGROUP]
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CGROUP / "memory" if controllers else CGROUP
        path = top / name.lstrip("/")
        # In a container the name may be that of the host's tree, which is not mounted here.
        groups += [folder for folder in (path, *path.parents) if top in (folder, *folder.parents)]
    return [folder for folder in dict.fromkeys(groups) if folder.is_dir()]


def _cache(folder: Path) -> int:
    stat = folder / "memory.stat"
    if not stat.exists():
        return 0
    lines = dict(line.split(" ", 1) for line in stat.read_text().splitlines() if " " in line)
    return int(lines.get("inactive_file", lines.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    # "max" where the group is unlimited; no file where this version of the interface is not mounted.
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def locked_limit() -> int | None:
    """The most bytes that this process may lock (`ulimit -l`), or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_all():
        return None
    return soft


def _may_lock_all() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def describe_locked_limit() -> str:
    """For messages: the limit of locked memory, and how it is raised."""
    limit = locked_limit()
    if limit is None:
        return "`ulimit -l` does not limit locked memory here"
    return (
        f"`ulimit -l` allows {format_bytes(limit)} of locked memory; raise it (ulimit -l unlimited, memlock in "
        "/etc/security/limits.conf, or --ulimit memlock=-1 for the container)"
    )


def check_lockable(nbytes: int, what: str) -> None:
    """Lock that many bytes, and let go of them. Raises CapacityError, with the limit, if the kernel refuses."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_LOCKED).close()
    except OSError as cause:
        raise CapacityError(
            f"{what} need {format_bytes(nbytes)} more of locked memory ({cause}): {describe_locked_limit()}"
        ) from cause


def describe_host_limits() -> str:
    """For messages: free host memory, and the control groups that make it less than the machine's."""
    machine = psutil.virtual_memory()
    more = uncounted_bytes(machine.total)
    parts = [
        f"{format_bytes(machine.available + more)} of the machine's {format_bytes(machine.total + more)} are available"
    ]
    for folder, limit, used in cgroup_limits():
        parts.append(f"the container's limit ({folder}) is {format_bytes(limit)}, {format_bytes(used)} of it used")
    return ", ".join(parts)


def numa_nodes() -> dict[int, int]:
    """Each NUMA node that has memory: bytes of it that are free or hold cached files."""
    found = {}
    for folder in sorted(_NODES.glob("node[0-9]*")):
        info = folder / "meminfo"
        if info.exists():
            # "Node 0 MemFree:  123 kB"
            fields = {line.split()[2].rstrip(":"): int(line.split()[3]) << 10 for line in info.read_text().splitlines()}
            if fields.get("MemTotal"):
                free = fields.get("MemFree", 0) + fields.get("FilePages", 0)
                found[int(folder.name[4:])] = free + uncounted_bytes(fields["MemTotal"], folder)
    return found
