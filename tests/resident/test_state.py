"""States: sizes, field slices, and what is refused."""

from __future__ import annotations

import pytest
import torch

from longstraw.resident import Field, State, StateKind
from longstraw.resident.state import DTYPE_BYTES


def make(*fields: Field, dtype: str = "bfloat16") -> State:
    return State(StateKind.TOKEN, 3, "kv", fields, dtype)


def test_row_sizes_and_slices() -> None:
    state = make(Field("k", (4, 8)), Field("v", (4, 6)), Field("beta", ()))
    assert state.row_elements == 32 + 24 + 1
    assert state.row_bytes == 57 * 2
    assert state.field_slices() == {"k": (0, 32, (4, 8)), "v": (32, 56, (4, 6)), "beta": (56, 57, ())}


def test_equal_states_are_one_key() -> None:
    assert len({make(Field("k", (2,))), make(Field("k", (2,))), make(Field("k", (3,)))}) == 2


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_dtype_bytes_are_torchs(name: str) -> None:
    assert DTYPE_BYTES[name] == getattr(torch, name).itemsize


def test_refuses_what_has_no_rows() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        make(Field("k", (2,)), dtype="float17")
    with pytest.raises(ValueError, match="fields"):
        make()
    with pytest.raises(ValueError, match="different names"):
        make(Field("k", (2,)), Field("k", (3,)))
    with pytest.raises(ValueError, match="at least 1"):
        Field("k", (2, 0))
