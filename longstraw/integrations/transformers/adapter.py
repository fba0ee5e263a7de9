"""A transformers causal LM, presented to the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longstraw.errors import TransactionStateError, UnsupportedModelError
from longstraw.integrations.transformers import attention, checks, rope, routers
from longstraw.integrations.transformers.families import family_of
from longstraw.integrations.transformers.head import BehindHead, head_output, is_linear
from longstraw.integrations.transformers.probe import probe
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.sharding import Sharding


class TransformersAdapter:
    """`ModelAdapter` of a transformers model, with or without PEFT adapters.

    During a pass some things of the model are exchanged, and put back afterwards: the attention implementation
    (transformers' own interface), the forward of mixers that do not go through it, the LM head's forward, the decoder
    layers' forward (for checkpointing), transformers' checkpointing, which is switched off, and so is its collecting of
    router logits, in whose place hooks on the routers follow them.
    """

    def __init__(self, sharding: Sharding, kernels: Mapping[str, str] | None = None) -> None:
        self.sharding = sharding
        self._model = model = sharding.inner
        self._kernels = dict(kernels or {})
        self._base = checks.unwrap(model)
        self._config = checks.text_config(self._base)
        self._layers = checks.find_attentions(self._base)
        self._blocks = checks.decoder_layers(self._base, self._config)
        self._softcap_key, self._divisor_key, self._multiplier = checks.behind_head(self._layers)
        families = (family_of(mixer) for _, mixer in self._layers.values())
        self._casts_logits = any(family is not None and family.casts_logits for family in families)
        self._device = sharding.device() or checks.single_device(model)
        self._rotaries = rope.rotary_modules(self._base)
        self._routers = routers.find_routers(self._base)
        self._profiles: dict[Hashable, ModelProfile] = {}
        self._head_result: Tensor | None = None
        self._untouched_hooks: Hashable = None
        checks.refuse_dropout(model, self._config)
        checks.refuse_tuples(self._base)
        checks.refuse_router_noise(model)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def modules(self) -> nn.Module:
        return self._model

    @property
    def layer_numbers(self) -> frozenset[int]:
        """Of the decoder layers that mix tokens."""
        return frozenset(self._layers)

    @property
    def blocks(self) -> int:
        """How many decoder layers there are."""
        return len(self._blocks)

    @property
    def linear_head(self) -> bool:
        """Whether the LM head is a linear layer and no more. Not to be asked within a pass."""
        head = self._base.get_output_embeddings()
        return is_linear(head, head.forward)

    @property
    def softcap(self) -> bool:
        """Whether the model caps its logits. Not to be asked within a pass."""
        return self._softcap_key is not None and bool(getattr(self._base.config, self._softcap_key, None))

    @contextmanager
    def each_layer(self, around: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
        """Runs each decoder layer, counted from 0, within a context of its own."""
        with ExitStack() as stack:
            for number, layer in enumerate(self._blocks):
                stack.enter_context(_exchanged(layer, _within(layer.forward, functools.partial(around, number))))
            yield

    def state_key(self) -> Hashable:
        return checks.adapter_state(self._model)

    def frequencies_key(self, row_tokens: int) -> Hashable:
        return rope.frequencies_key(self._rotaries, row_tokens)

    def _profile_key(self) -> Hashable:
        return (
            self.sharding.layout(),
            self._model.training,
            self.state_key(),
            self.no_aux_loss(),
            torch.get_autocast_dtype(self._device.type) if torch.is_autocast_enabled(self._device.type) else None,
        )

    def no_aux_loss(self) -> str | None:
        """Why the routers' auxiliary loss is not computed, or None if it is."""
        return routers.no_aux_loss(self._base, self._config, self._routers)

    def is_profiled(self) -> bool:
        return self._profile_key() in self._profiles

    def profile(self) -> ModelProfile:
        key = self._profile_key()
        # Each time: a dropout can be set, or a module compiled or put in training mode, without a trace in the key.
        followed = self._routers if self.no_aux_loss() is None else ()
        routers.refuse_shared_routers(self._blocks, followed)
        checks.refuse_compiled(self._model, (self._base.get_output_embeddings(), *self._rotaries, *followed))
        checks.refuse_dropout(self._model, self._config)
        checks.refuse_tuples(self._base)
        checks.refuse_router_noise(self._model)
        if key not in self._profiles:
            self._profiles[key] = probe(self, self._config)
        return self._profiles[key]

    def run(self, forward: ForwardPass, input_ids_S: Tensor, positions_S: Tensor) -> Tensor:
        self._head_result = None
        self.sharding.begin_pass()
        output = self.sharding.called(input_ids=input_ids_S[None], position_ids=positions_S[None], use_cache=False)
        result: Tensor = output.logits if hasattr(output, "logits") else output[0]
        if result.is_complex():
            result = torch.view_as_real(result)
        self._check_untouched(result)
        self._head_result = None
        return result[0]

    def _check_untouched(self, result: Tensor) -> None:
        """A model that changes its logits (a soft cap, a scale) would change our log-probs instead."""
        hooks = self._hooks_behind_head()
        if self._untouched_hooks == hooks:
            return
        ours = self._head_result
        if ours is not None and ours.dtype == torch.float64 and result.dtype == torch.float32:
            # Logits of such a model are float32 whatever its own dtype, and so are the log-probs then.
            ours = ours.float()
        if ours is None or result.shape != ours.shape or not torch.equal(result.detach().to(ours.dtype), ours):
            raise UnsupportedModelError(
                f"{type(self._base).__name__} changes its logits after the LM head, which is not supported yet"
            )
        self._untouched_hooks = hooks

    def _hooks_behind_head(self) -> Hashable:
        """The head, and the hooks that can change what it puts out; hooks are numbered as they are registered."""
        head = self._base.get_output_embeddings()
        return id(head), *(tuple(module._forward_hooks) for module in (head, self._base, self._model))

    @contextmanager
    def active(self, forward: ForwardPass) -> Iterator[None]:
        forward.kernels = self._kernels
        with ExitStack() as stack:
            stack.enter_context(attention.attending((module for _, module in self._layers.values()), forward))
            stack.enter_context(self._attention_implementation())
            stack.enter_context(rope.pinned(self._rotaries, forward.row_tokens))
            stack.enter_context(self._without_checkpointing())
            stack.enter_context(routers.not_collected(self._base.config, self._config))
            if forward.routers is not None:
                top_k = self._config.num_experts_per_tok
                stack.enter_context(routers.followed(self._routers, forward.routers, top_k))
            head = self._base.get_output_embeddings()
            behind = stack.enter_context(self._nothing_behind_head())
            stack.enter_context(
                _exchanged(head, functools.partial(self._head_forward, head, head.forward, forward, behind))
            )
            if self.sharding.casts_outputs and self._casts_logits:
                stack.enter_context(_exchanged(self._base, _uncast(self._base.forward)))
            for _, mixer in self._layers.values():
                family = family_of(mixer)
                if family is not None and family.exchange is not None:
                    stack.enter_context(_exchanged(mixer, family.exchange(mixer, forward)))
            if forward.checkpoint:
                for layer in self._blocks:
                    stack.enter_context(_exchanged(layer, _checkpointed(layer.forward)))
            yield

    def _head_forward(
        self, head: nn.Module, original: Any, forward: ForwardPass, behind: BehindHead, hidden_states: Tensor
    ) -> Tensor:
        result = head_output(head, original, hidden_states, forward, behind)
        if self._untouched_hooks != self._hooks_behind_head():
            self._head_result = result.detach()
        if self.sharding.casts_outputs and not self._casts_logits:
            # A framework may cast floating outputs, to bfloat16 say. Log-probs must not lose their bits on the way out
            # of the model, and complex numbers pass such a cast as they are.
            result = _as_complex(result)
        return result

    @contextmanager
    def _attention_implementation(self) -> Iterator[None]:
        # A layer that was copied into the model has a copy of the config.
        own = [mixer.config for _, mixer in self._layers.values() if hasattr(mixer, "config")]
        configs = {id(config): config for config in (self._base.config, self._config, *own)}.values()
        before = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation = attention.NAME
        try:
            yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation = implementation

    @contextmanager
    def _nothing_behind_head(self) -> Iterator[BehindHead]:
        """What the model does to its logits, and leaves out within: it would act on our log-probs instead."""
        # The class that has the head reads its own config: a multimodal one does not look into its text part's.
        config = self._base.config
        places = [(config, self._softcap_key, None), (config, self._divisor_key, 1.0)]
        places.append((self._base.base_model, self._multiplier, 1.0))
        neutral = [(holder, key, value) for holder, key, value in places if key is not None]
        before = {key: getattr(holder, key, value) for holder, key, value in neutral}
        for holder, key, value in neutral:
            setattr(holder, key, value)
        try:
            divisor = before.get(self._divisor_key or "") or 1.0 / (before.get(self._multiplier or "") or 1.0)
            yield BehindHead(softcap=before.get(self._softcap_key or ""), divisor=divisor)
        finally:
            for holder, key, _ in neutral:
                setattr(holder, key, before[key])

    @contextmanager
    def _without_checkpointing(self) -> Iterator[None]:
        on = [m for m in self._base.modules() if getattr(m, "gradient_checkpointing", False)]
        for module in on:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for module in on:
                module.gradient_checkpointing = True  # type: ignore[assignment]

    @contextmanager
    def _disabled_adapters(self) -> Iterator[None]:
        layers = [m for m in self._base.modules() if checks.is_tuner_layer(m) and not m.disable_adapters]
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[operator]
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # type: ignore[operator]

    @contextmanager
    def _freezes_kept(self, reference: AbstractContextManager[None]) -> Iterator[None]:
        """PEFT freezes the adapters that it disables, and would then train all of them, frozen before or not."""
        before = {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
        try:
            with reference:
                yield
        finally:
            for name, parameter in self._model.named_parameters():
                parameter.requires_grad_(before[name])

    def reference(self) -> AbstractContextManager[None]:
        if hasattr(self._model, "disable_adapter"):
            return self._freezes_kept(self._model.disable_adapter())  # type: ignore[operator]
        if getattr(self._base, "_hf_peft_config_loaded", False):
            return self._freezes_kept(self._disabled_adapters())
        raise TransactionStateError("adapter=None: the model has no PEFT adapters to leave out; give model=ref_model")


@contextmanager
def _exchanged(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it `module` runs `forward`; its hooks stay around it."""
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is missing:
            del module.__dict__["forward"]
        else:
            module.forward = before  # type: ignore[method-assign, assignment]


def _uncast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make log-probs complex, as `_head_forward` does, behind a model that casts its logits to float32 itself."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if output.logits.dtype.itemsize < 4:
            raise UnsupportedModelError(
                f"a wrapper around the model's forward casts its outputs to {output.logits.dtype}, and the log-probs "
                "with them, which this model's own cast to float32 does not let pass; leave such mixed precision to "
                "FSDP2's MixedPrecisionPolicy"
            )
        output.logits = _as_complex(output.logits)
        return output

    return forward


def _as_complex(result: Tensor) -> Tensor:
    """What a framework's cast of floating outputs passes as it is; a copy, as its hooks want no views."""
    return (torch.view_as_complex(result) if result.shape[-1] == 2 else result).clone()


def _within(original: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    return forward


def _checkpointed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        # No random numbers are drawn in a layer: dropout is refused.
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward
