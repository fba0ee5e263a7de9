"""What a transformers model must be for its gradients to come out exact; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longstraw.errors import UnsupportedModelError
from longstraw.integrations.transformers.families import FAMILIES, family_of, known_classes
from longstraw.integrations.transformers.families.family import index_beside

_WRAPPERS = {
    "FullyShardedDataParallel": "FSDP1; use FSDP2, torch.distributed.fsdp.fully_shard",
    "DataParallel": "DataParallel; use DistributedDataParallel, one process a device",
    "DistributedDataParallel": "DDP inside another wrapper; wrap the model in DDP last",
}

# Rates that models hand to a function: no module shows them.
_FUNCTIONAL_DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout")


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's wrappers.

    Raises UnsupportedModelError for what is no transformers causal LM, or is wrapped in a way that is not supported.
    """
    for module in model.modules():
        wrapper = _WRAPPERS.get(type(module).__name__)
        if wrapper is not None:
            raise UnsupportedModelError(f"the model is wrapped in {wrapper}")
    refuse_compiled(model)
    _refuse_prompt_learning(model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model; pass an AutoModelForCausalLM or a PEFT model around one"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no LM head; pass a ...ForCausalLM class")
    return model


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` wraps the module, or its `compile` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def refuse_compiled(model: nn.Module, others: Iterable[nn.Module | None] = ()) -> None:
    """Raises UnsupportedModelError if a compiled part of the model holds an attention, or one of `others`: in a pass
    their forward is exchanged, or hooked, and compiled code goes on with what was there when it was compiled."""
    touched = set(others)
    for name, module in model.named_modules():
        if is_compiled(module) and any(part in touched or hasattr(part, "layer_idx") for part in module.modules()):
            raise UnsupportedModelError(
                f"{name or 'the model'} is compiled, and has parts that work otherwise in a transaction; pass the "
                "model before torch.compile (MLPs may be compiled)"
            )


def _refuse_prompt_learning(model: nn.Module) -> None:
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"PEFT adapter {name!r} is of type {config.peft_type}, which adds tokens to the prompt; use LoRA or "
                "another adapter that changes layers"
            )


def find_attentions(model: PreTrainedModel) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Each decoder layer with its attention module, by layer number; layers that mix no tokens are left out, and
    mixers beside an attention go by `index_beside`.

    Raises UnsupportedModelError, with the class's name, if some layer has none of a known family, or more than one.
    """
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; only decoders are supported")
    layers = decoder_layers(model, config)
    found: dict[int, tuple[nn.Module, nn.Module]] = {}
    rowwise = frozenset[str]().union(*(family.rowwise_classes for family in FAMILIES))
    for number, layer in enumerate(layers):
        mixers = _outermost([m for m in layer.modules() if m is not layer and hasattr(m, "layer_idx")])
        alone: list[nn.Module] = []
        beside: list[nn.Module] = []
        for mixer in mixers:
            family = family_of(mixer)
            if family is None:
                raise UnsupportedModelError(
                    f"layer {number} of {type(model).__name__} mixes tokens by {type(mixer).__name__}, which is not "
                    f"supported yet; supported are {', '.join(known_classes())}. docs/adding_a_family.md says how to "
                    "add one"
                )
            reason = family.refuse(mixer, config)
            if reason is not None:
                raise UnsupportedModelError(f"{type(model).__name__}: {reason}")
            (beside if family.beside else alone).append(mixer)
        if not mixers and any(type(child).__name__ in rowwise for child in layer.children()):
            continue
        if any(mixer is other for mixer in mixers for _, other in found.values()):
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} shares its {type(mixers[0]).__name__} with an earlier one; "
                "each layer needs a module of its own there (their weights may be tied)"
            )
        if len(alone) != 1 or len(beside) > 1 or alone[0].layer_idx in found:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} has {len(mixers)} attention modules of its own; "
                "one is needed"
            )
        found |= {index_beside(mixer): (layer, mixer) for mixer in beside}
        found[alone[0].layer_idx] = (layer, alone[0])  # type: ignore[index]
    return found


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Without those that are a part of another, as an indexer is of its attention."""
    parts = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in parts]


def behind_head(layers: dict[int, tuple[nn.Module, nn.Module]]) -> tuple[str | None, str | None, str | None]:
    """Where the model says what it does to its logits: the text config's keys of their soft cap and of their divisor,
    and the attribute that they are multiplied with."""
    families = [family for _, mixer in layers.values() if (family := family_of(mixer)) is not None]
    softcaps = {family.head_softcap_key for family in families} - {None}
    divisors = {family.head_divisor_key for family in families} - {None}
    multipliers = {family.head_multiplier for family in families} - {None}
    # A model with several would have to say which comes first.
    assert len(softcaps) + len(divisors) + len(multipliers) <= 1, (softcaps, divisors, multipliers)
    return next(iter(softcaps), None), next(iter(divisors), None), next(iter(multipliers), None)


def text_config(model: PreTrainedModel) -> Any:
    """The config of the language model, also inside a multimodal class."""
    return model.config.get_text_config()


def decoder_layers(model: PreTrainedModel, config: Any) -> nn.ModuleList:
    """The stack of all decoder layers, those that mix no tokens too."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    lists = [m for m in lists if any(hasattr(child, "layer_idx") for child in m[0].modules())]
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: found {len(lists)} stacks of {count} decoder layers, expected one"
        )
    return lists[0]


def refuse_tuples(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if the model, or its text part, is set to return tuples."""
    for config in (model.config, text_config(model)):
        if not getattr(config, "return_dict", True):
            raise UnsupportedModelError(
                "config.return_dict is False, and transformers' causal LMs fail on the tuples that their own parts "
                "then return; set it to True (return_dict=False in a call of yours still gives a tuple)"
            )


def refuse_router_noise(model: nn.Module) -> None:
    """Raises UnsupportedModelError if a router of experts draws random numbers."""
    for name, module in model.named_modules() if model.training else ():
        if getattr(module, "jitter_noise", 0):
            raise UnsupportedModelError(
                f"{name}.jitter_noise is {module.jitter_noise}: a captured token would be routed differently when it "
                "is "
                "swept; set it to 0, or call model.eval()"
            )


def refuse_dropout(model: nn.Module, config: Any) -> None:
    """Raises UnsupportedModelError if a dropout is active: a replayed prompt would draw other masks than its
    capture."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            raise UnsupportedModelError(
                f"{name} drops out with p={module.p}: captured and replayed tokens would see different masks; set the "
                "dropout to 0 (for LoRA lora_dropout=0), or call model.eval()"
            )
    for key in _FUNCTIONAL_DROPOUTS if model.training else ():
        rate = getattr(config, key, 0.0)
        if rate:
            raise UnsupportedModelError(
                f"config.{key} is {rate}: captured and replayed tokens would see different masks; set it to 0, "
                "or call model.eval()"
            )


def single_device(model: nn.Module) -> torch.device:
    """The device of all parameters. Raises UnsupportedModelError if there are several, or if some are on meta."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModelError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}; put them on one device"
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"the model is on {device}; only cpu and cuda devices are supported")
    return device


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT's that holds adapters: a property of its has the name of a method of transformers'
    models."""
    return isinstance(getattr(type(module), "disable_adapters", None), property)


def adapter_state(model: nn.Module) -> Hashable:
    """Which adapters act in each layer and how strongly: PEFT's own attributes of its tuner layers."""
    states: list[Hashable] = []
    for name, module in model.named_modules():
        if is_tuner_layer(module):
            scaling = getattr(module, "scaling", None)
            states.append(
                (
                    name,
                    bool(module.disable_adapters),
                    tuple(module.active_adapters),
                    tuple(getattr(module, "merged_adapters", ())),
                    tuple(sorted(scaling.items())) if isinstance(scaling, dict) else None,
                )
            )
    return AdapterState(tuple(states))


class AdapterState:
    """Hashable state of all adapters, with a short text for messages."""

    def __init__(self, layers: tuple[Hashable, ...]) -> None:
        self._layers = layers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterState) and self._layers == other._layers

    def __hash__(self) -> int:
        return hash(self._layers)

    def __repr__(self) -> str:
        if not self._layers:
            return "no adapters"
        _, disabled, active, merged, scaling = self._layers[0]  # type: ignore[misc]
        return f"active {list(active)}{' disabled' if disabled else ''}, merged {list(merged)}, scaling {scaling}"  # type: ignore[has-type]
