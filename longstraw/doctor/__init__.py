"""What this machine has for long-context training, what it lacks, and how fast its links and disks are."""

from longstraw.doctor.examine import examine
from longstraw.doctor.finding import Finding, Level
from longstraw.doctor.links import LinkRates, measure_links
from longstraw.doctor.probe import DiskRates, ProbeResult, probe

__all__ = ["DiskRates", "Finding", "Level", "LinkRates", "ProbeResult", "examine", "measure_links", "probe"]
