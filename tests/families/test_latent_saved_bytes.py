"""What autograd keeps of a latent or sparse model does not grow with the prompt, in replay and in the sweep."""

from __future__ import annotations

import pytest
import torch

from longstraw import Runtime
from tests.families.latent_models import KINDS
from tests.parity.models import build, make_group, replay_group, settings
from tests.parity.test_saved_bytes import SavedBytes


def measure(kind: str, prompt_tokens: int, checkpoint: bool) -> tuple[int, int]:
    """Most bytes saved at once in replay (with its backward) and in the sweep."""
    config = settings(
        replay={"checkpoint": checkpoint, "lane_tokens": 64},
        capture={"chunk_tokens": 128},
        pages={"tokens": 128, "block_tokens": 256},
    )
    model = build(kind, dtype=torch.float32, **KINDS[kind])
    group = make_group(prompt_tokens, (40, 1, 20))
    with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        with SavedBytes(model) as replay:
            replay_group(txn, group)
        with SavedBytes(model) as sweep:
            txn.sweep()
    return replay.peak, sweep.peak


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_saved_bytes_do_not_grow_with_the_prompt(kind: str, checkpoint: bool) -> None:
    figures = [measure(kind, tokens, checkpoint) for tokens in (257, 1_025, 2_049)]
    for phase in zip(*figures, strict=True):
        assert min(phase) > 10_000, "nothing was counted"
        # Which expert a token goes to decides how many rows each expert's products save.
        assert max(phase) <= 1.1 * min(phase), figures
