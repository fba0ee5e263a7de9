"""What RESULTS.md reports, command by command, with what each needs of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One command of the suite.

    `seconds` is the time after which it is stopped; its first compilations are in it. `device_gib` is the most that it
    takes of one GPU. A figure that is `timed` runs alone; the others run beside one another. In `command`, `{out}`
    becomes the file for its records, and `{scratch}` a folder that is deleted behind it.
    """

    name: str
    command: str
    seconds: int
    device_gib: int = 0
    gpus: int = 1
    timed: bool = True


_STEP = "python -m benchmarks.step --out {out}"
_LIKE = f"{_STEP} --lora --prompt 131072 --group 16 --chunk 4096 --lane 8192 --keep never"
_TWO = "torchrun --nproc-per-node 2 -m benchmarks.two_gpus --prompt 65536 --profile --out {out}"
_LAYERS = "python -m benchmarks.family_layers --out {out} --host-budget 40GiB"

FIGURES: tuple[Figure, ...] = (
    # Two GPUs.
    Figure(
        name="nccl-tests", command="python -m pytest -q -m multi_gpu tests/distributed", seconds=240, gpus=2,
        device_gib=40,
    ),
    Figure(name="two-gpus-fsdp2", command=f"{_TWO} --framework fsdp2", seconds=220, gpus=2, device_gib=130),
    Figure(name="two-gpus-zero3", command=f"{_TWO} --framework zero3", seconds=220, gpus=2, device_gib=130),
    # Right or wrong: no times are taken, so these share the machine.
    Figure(
        name="gradients-qwen3_6", seconds=800, device_gib=122, timed=False,
        command=f"{_LAYERS} --family qwen3_6 --check 49152 32768 --rule torch fla --device-cap 120",
    ),
    Figure(
        name="gradients-glm5_2", seconds=400, device_gib=122, timed=False,
        command=f"{_LAYERS} --family glm5_2 --experts 8 --check 16384 13312 12288 --device-cap 120",
    ),
    Figure(
        name="stress",
        command=(
            "longstraw stress --device cuda --seconds 600 --seed 1 --scratch {scratch} --prompt-tokens 24576 "
            "--response-tokens 256 --group 4 --layers 4 --hidden-size 256 --parity-tokens 24576 --parity-rate 0.2 "
            "--fault-rate 0.4 --json {out}"
        ),
        seconds=690, device_gib=8, timed=False,
    ),
    Figure(
        name="gpu-tests", seconds=620, device_gib=48, timed=False,
        command="python -m pytest -q -n 8 --durations 12 -m 'gpu and not multi_gpu' tests",
    ),
    Figure(
        name="memory-growth", command="python -m benchmarks.memory_growth --layers 4 --out {out}", seconds=300,
        device_gib=14, timed=False,
    ),
    Figure(
        name="memory-growth-36-layers", seconds=200, device_gib=72, timed=False,
        command=(
            "python -m benchmarks.memory_growth --layers 36 --mode detached --prompt 65536 262144 --host-budget 50GiB "
            "--out {out}"
        ),
    ),
    # Times of one GPU.
    Figure(
        name="step-32k", seconds=150, device_gib=120,
        command=f"{_STEP} --lora --prompt 32768 --ours host detached --repeats 2 --packed 2 --ordinary-rows 1",
    ),
    Figure(
        name="step-32k-all-weights", seconds=120, device_gib=135,
        command=f"{_STEP} --prompt 32768 --ours host --repeats 2 --ordinary-rows 2",
    ),
    Figure(
        name="step-65k", seconds=200, device_gib=120,
        command=f"{_STEP} --lora --prompt 65536 --ours host --repeats 2 --packed 2",
    ),
    Figure(
        name="paged-over-resident-detached", seconds=170, device_gib=120,
        command=f"{_LIKE} --ours detached detached-device --device-budget 40GiB --repeats 2",
    ),
    Figure(
        name="paged-over-resident-exact", seconds=360, device_gib=135,
        command=f"{_LIKE} --ours host device --repeats 2 1",
    ),
    Figure(
        name="capacity-exact", seconds=240, device_gib=130,
        command="python -m benchmarks.capacity --mode exact --prompt 131072 --host-budget 70GiB --out {out}",
    ),
    Figure(
        name="capacity-detached", seconds=300, device_gib=130,
        command="python -m benchmarks.capacity --mode detached --prompt 524288 --host-budget 40GiB --out {out}",
    ),
    Figure(
        name="longest-packed", command="python -m benchmarks.longest_packed --out {out}", seconds=500, device_gib=139,
    ),
    Figure(
        name="step-131k", seconds=240, device_gib=120,
        command=f"{_STEP} --lora --prompt 131072 --ours host --host-budget 100GiB --repeats 2",
    ),
    Figure(
        name="step-32k-g16", seconds=150, device_gib=120,
        command=f"{_STEP} --lora --prompt 32768 --group 16 --ours host --repeats 2 --packed 2 --ordinary-rows 1",
    ),
    Figure(
        name="step-32k-g16-all-weights", seconds=120, device_gib=135,
        command=f"{_STEP} --prompt 32768 --group 16 --ours host --repeats 2 --ordinary-rows 2",
    ),
    Figure(
        name="attention-over-pages", seconds=180, device_gib=60,
        command="python -m benchmarks.attention_over_pages --block 67584 --out {out}",
    ),
    Figure(
        name="attention-kernels", command="python -m benchmarks.attention_kernels --out {out}", seconds=60,
        device_gib=30,
    ),
    Figure(name="host-arena", command="python -m benchmarks.host_arena --out {out}", seconds=120, device_gib=4),
    Figure(
        name="disk-engines", seconds=150, device_gib=2,
        command="python -m benchmarks.disk_engines --path {scratch} --size 4GiB --out {out}",
    ),
    Figure(
        name="disk-sweep", seconds=120, device_gib=2,
        command="python -m benchmarks.disk_engines --path {scratch} --size 1GiB --rounds 1 --sweep --out {out}",
    ),
    Figure(
        name="layers-qwen3_6", command=f"{_LAYERS} --family qwen3_6 --prompt 131072", seconds=150, device_gib=80,
    ),
    Figure(
        name="layers-glm5_2", command=f"{_LAYERS} --family glm5_2 --experts 16 --prompt 131072", seconds=150,
        device_gib=120,
    ),
    Figure(
        name="profile-step", command="python -m benchmarks.profile_step", seconds=90, device_gib=60,
    ),
)  # fmt: skip
"""In the order in which they run."""
