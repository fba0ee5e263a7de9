"""Branches packed one after another: what each row reads, where it stands, what it predicts."""

from __future__ import annotations

import torch

from longstraw.runtime.branches import PackedBranches, check_prompt, check_responses


def test_a_branch_begins_with_the_prompts_last_token() -> None:
    prompt = torch.tensor([10, 11, 12])
    packed = PackedBranches(prompt[-1], 3, [torch.tensor([20, 21]), torch.tensor([30])], torch.device("cpu"))
    assert packed.lengths == (2, 1)
    assert packed.input_ids_S.tolist() == [12, 20, 12]
    assert packed.positions_S.tolist() == [2, 3, 2]
    assert packed.targets_S.tolist() == [20, 21, 30]


def test_a_whole_branch_also_reads_its_last_token_whose_row_answers_nothing() -> None:
    prompt = torch.tensor([10, 11, 12])
    responses = [torch.tensor([20, 21]), torch.tensor([30])]
    packed = PackedBranches(prompt[-1], 3, responses, torch.device("cpu"), whole=True)
    assert packed.lengths == (3, 2)
    assert packed.input_ids_S.tolist() == [12, 20, 21, 12, 30]
    assert packed.positions_S.tolist() == [2, 3, 4, 2, 3]
    assert packed.answers(packed.targets_S[:, None])[:, 0].tolist() == [20, 21, 30]


def test_ids_come_out_as_int64_on_the_cpu() -> None:
    prompt = check_prompt(torch.tensor([0, 96], dtype=torch.int32), 97)
    assert prompt.dtype == torch.int64
    assert [r.tolist() for r in check_responses([torch.tensor([5]), torch.tensor([6, 7])], 97)] == [[5], [6, 7]]


def test_the_users_tensor_is_not_kept() -> None:
    # A user who reuses a buffer between capture and replay must not change the prompt.
    ids = torch.tensor([1, 2, 3])
    kept = check_prompt(ids, 97)
    ids.zero_()
    assert kept.tolist() == [1, 2, 3]
