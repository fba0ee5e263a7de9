"""What a family file says of its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of attention whose state and gradient the runtime carries exactly.

    Attributes:
        name: for messages.
        attention_classes: names of the transformers classes of its attention modules.
        refuse: given an attention module and the model's text config, why it cannot be carried, or None.
    """

    name: str
    attention_classes: frozenset[str]
    refuse: Callable[[nn.Module, Any], str | None]
