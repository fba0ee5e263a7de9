"""What `longstraw plan` says of measured steps: memory and time, planned over measured.

    python -m benchmarks.plan_check results.jsonl

Reads the records of `benchmarks.step`, `benchmarks.capacity` and `benchmarks.memory_growth`; needs no GPU. The plan is
made with the settings of the run, and the chunks, lanes and checkpointing that `auto` found there are left to it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.common import QWEN3_8B
from benchmarks.family_layers import SHAPES
from longstraw import Config
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Blueprint, Machine, Plan, Workload, make_plan

PHASES = ("capture", "replay", "backward", "sweep")


def model(record: dict[str, Any]) -> Blueprint:
    """The blueprint of what a record ran."""
    layers = record["layers"]
    if record["figure"].startswith("capacity"):
        pattern = SHAPES["qwen3_6"]["layer_types"]
        shape = {"num_hidden_layers": layers, "layer_types": [pattern[i % len(pattern)] for i in range(layers)]}
        rule = record["settings"].get("kernels", {}).get("gated_delta", "auto")
        config = AutoConfig.for_model("qwen3_5_text", **(SHAPES["qwen3_6"] | shape))
        return blueprint(config, lora_rank=16, gated_delta=rule)
    config = AutoConfig.for_model("qwen3", **(QWEN3_8B | {"num_hidden_layers": layers}))
    return blueprint(config, lora_rank=16 if record.get("lora", True) else None)


def planned(record: dict[str, Any], machine: Machine) -> Plan:
    """The plan with the settings that the record was made with."""
    workload = Workload(prompt=record["prompt"], group=record["group"], response=record["response"])
    return make_plan(model(record), workload, Config(**record["settings"]), machine)


def compare(record: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Planned over measured: 1 is a plan that was right."""
    plan, report = planned(record, machine), record["report"]
    measured = {name: report["seconds"][name] for name in PHASES if name in plan.phases}
    found: dict[str, Any] = {"figure": record["figure"]}
    found |= {key: record[key] for key in ("layers", "lora", "prompt", "group") if key in record}
    found["keep"] = record["settings"].get("capture", {}).get("keep_attention", "auto")
    found["tier"] = record["settings"]["tiers"][0]["kind"]
    if plan.problem is not None:
        return found | {"problem": plan.problem}
    found["memory"] = plan.memory.beyond_weights / 2**30 / record["peak_beyond_weights_gib"]
    found["pages"] = sum(plan.pages.values()) / max(sum(report["tier_bytes"].values()), 1)
    found["seconds"] = plan.seconds / sum(measured.values())
    found["phases"] = {name: plan.phases[name].seconds / measured[name] for name in measured}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="JSON lines that the benchmarks wrote with --out")
    parser.add_argument("--rates", type=Path, help="a record of `longstraw probe`, or a JSON of rates")
    options = parser.parse_args()
    machine = Machine() if options.rates is None else Machine.load(options.rates)
    for path in options.records:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "settings" in record:
                print(json.dumps(compare(record, machine)), flush=True)


if __name__ == "__main__":
    main()
