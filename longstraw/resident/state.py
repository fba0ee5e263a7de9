"""What a layer keeps of the prompt: which values, in which order, and how many bytes a row takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, by torch's own name of the dtype."""


class StateKind(Enum):
    """How a state grows.

    TOKEN: one row a token (attention K and V, a latent, indexer keys). CARRIED: fixed size, overwritten as
    tokens come (recurrent matrix, convolution window); one row a snapshot.
    """

    TOKEN = "token"
    CARRIED = "carried"


@dataclass(frozen=True, slots=True)
class Field:
    """One named value of a row, e.g. `Field(name="k", shape=(num_kv_heads, head_dim))`; the shape is per
    row."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"field {self.name!r} has the shape {self.shape}: every size must be at least 1")

    @property
    def elements(self) -> int:
        """Number of values in one row."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class State:
    """One layer's state of one kind: rows of `fields` side by side, all of one dtype.

    `name` tells the states of a layer apart ("kv", "kv_grad"). `dtype` is torch's name of it ("bfloat16").
    Raises `ValueError` for an unknown dtype, no fields, or two fields of one name.
    """

    kind: StateKind
    layer: int
    name: str
    fields: tuple[Field, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"state {self}: dtype must be one of {', '.join(DTYPE_BYTES)}")
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"state {self}: fields must be given and have different names, not {names}")

    def __str__(self) -> str:
        return f"{self.name}[layer {self.layer}, {self.dtype}]"

    @property
    def row_elements(self) -> int:
        """Number of values in one row, over all fields."""
        return sum(field.elements for field in self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_elements * DTYPE_BYTES[self.dtype]

    def field_slices(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Where each field lies in a row: name -> (first element, one past the last element, shape per
        row)."""
        return dict(_field_slices(self.fields))


@cache
def _field_slices(fields: tuple[Field, ...]) -> tuple[tuple[str, tuple[int, int, tuple[int, ...]]], ...]:
    slices, start = [], 0
    for field in fields:
        slices.append((field.name, (start, start + field.elements, field.shape)))
        start += field.elements
    return tuple(slices)
