"""The routers of a transformers model: whether their auxiliary loss is asked for, and the hooks that follow them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longstraw.errors import UnsupportedModelError
from longstraw.integrations.transformers.families import FAMILIES
from longstraw.runtime.routers import RouterTally

SWITCH = "output_router_logits"
"""transformers' own key: with it a model's outputs have `aux_loss`."""


def find_routers(model: PreTrainedModel) -> list[nn.Module]:
    """The routers whose auxiliary loss transformers computes."""
    names = frozenset[str]().union(*(family.router_classes for family in FAMILIES))
    return [module for module in model.modules() if type(module).__name__ in names]


def no_aux_loss(model: PreTrainedModel, config: Any, routers: Sequence[nn.Module]) -> str | None:
    """Why the routers' auxiliary loss is not computed, or None if it is."""
    if not routers:
        return f"{type(model).__name__} has no routers of experts whose auxiliary loss transformers computes"
    if not getattr(config, SWITCH, False):
        return f"config.{SWITCH} is False; set it to True before the transaction, as for transformers' own aux_loss"
    return None


def refuse_shared_routers(layers: Iterable[nn.Module], routers: Sequence[nn.Module]) -> None:
    """Raises UnsupportedModelError if one router serves several layers: its second run in a pass would be taken for a
    recomputation of the first, and not be counted."""
    known, seen = set(routers), set[nn.Module]()
    for number, layer in enumerate(layers):
        own = known.intersection(layer.modules())
        if shared := own & seen:
            raise UnsupportedModelError(
                f"layer {number} shares its {type(shared.pop()).__name__} with an earlier layer, and their auxiliary "
                "loss cannot be told apart: give each layer a router of its own (weights may be tied), or set "
                f"config.{SWITCH} = False"
            )
        seen |= own


@contextmanager
def not_collected(*configs: Any) -> Iterator[None]:
    """Within it transformers holds no router logits, and computes no auxiliary loss of single passes."""
    on = [config for config in {id(config): config for config in configs}.values() if getattr(config, SWITCH, False)]
    for config in on:
        setattr(config, SWITCH, False)
    try:
        yield
    finally:
        for config in on:
            setattr(config, SWITCH, True)


@contextmanager
def followed(routers: Sequence[nn.Module], tally: RouterTally, top_k: int) -> Iterator[None]:
    """Within it every router that runs goes by `tally.route`."""

    def hook(router: nn.Module, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        if not (
            isinstance(output, tuple)
            and len(output) == 3
            and output[0].is_floating_point()
            and output[0].dim() == output[1].dim() == 2
        ):
            raise UnsupportedModelError(
                f"{type(router).__name__} does not return logits, weights and choices of experts, as in the "
                f"transformers releases that are supported; config.{SWITCH} = False does without its auxiliary loss"
            )
        logits_SN, weights_Sk, chosen_Sk = output
        return logits_SN, tally.route(id(router), logits_SN, weights_Sk, top_k), chosen_Sk

    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
