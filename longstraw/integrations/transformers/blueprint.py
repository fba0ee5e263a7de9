"""A transformers config's `Blueprint`: the runtime's own probe on a model whose tensors have shapes and no memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw.errors import ConfigError
from longstraw.integrations.plain import PlainSharding
from longstraw.integrations.transformers.adapter import TransformersAdapter
from longstraw.integrations.transformers.checks import find_attentions
from longstraw.integrations.transformers.experts import GROUPED, AnyGroup, refuses_grouped
from longstraw.integrations.transformers.families import family_of
from longstraw.integrations.transformers.families.gated_delta import MIXER as GATED_DELTA
from longstraw.integrations.transformers.families.kimi_linear import MIXER as KIMI_DELTA
from longstraw.kernels.gated_delta import fla_workspace_bytes
from longstraw.planner.blueprint import Blueprint, LayerWork
from longstraw.resident.state import StateKind
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DELTA = (GATED_DELTA, KIMI_DELTA)
_CHUNK = 64
"""Tokens of a chunk of the delta rule, in the kernels that compute it."""


def read_config(source: str | Path) -> Any:
    """The config of a model's folder, or in a config.json.

    Raises ConfigError if there is none, or transformers does not know its type.
    """
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"{source}: no such folder or file; give a model's folder, or its config.json")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{source}: no config that transformers can read ({error})") from error


def blueprint(
    config: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lora_rank: int | None = None,
    gated_delta: Literal["auto", "fla", "torch"] = "auto",
) -> Blueprint:
    """The blueprint of a causal LM with this config; no weight is made and nothing is computed.

    Args:
        config: a transformers config, a multimodal one too.
        dtype: of weights and activations.
        lora_rank: of LoRA matrices, of the same dtype, on every linear layer but the head; None trains all weights.
        gated_delta: what computes gated delta rules, as in `kernels.gated_delta`; "auto" is what it is on a GPU.

    Raises:
        UnsupportedModelError: some layer is of no supported family.
        ConfigError: `lora_rank` is asked for without PEFT, or flash-linear-attention for a dtype that it does not take.
    """
    text = copy.deepcopy(config.get_text_config())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text, dtype=dtype)
    looped = None
    if model._can_set_experts_implementation():
        # Grouped products have shapes wherever tokens are routed. A loop over experts has not; it keeps up to a tenth
        # more for autograd.
        model.set_experts_implementation(GROUPED)
        looped = refuses_grouped(model, dtype)
    model.train()
    # What a user of such a model has to switch off as well.
    for key in ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"):
        if getattr(text, key, 0.0):
            setattr(text, key, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    base, values = model, sum(p.numel() for p in model.parameters())
    if lora_rank is not None:
        model = _with_lora(model, lora_rank).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), AnyGroup():
        _without_memory(model)
        adapter = _ShapeAdapter(_ShapeSharding(model, wide=True), text, dtype)
        profile = adapter.profile()
    mixers = {index: mixer for index, (_, mixer) in find_attentions(base).items()}
    has_delta = any(family_of(mixer) in _DELTA for mixer in mixers.values())
    if has_delta and gated_delta == "fla" and dtype.itemsize != 2:
        raise ConfigError(
            f"kernels.gated_delta is fla, which computes float16 and bfloat16, not {dtype}; set it to auto or torch"
        )
    fused = has_delta and gated_delta != "torch" and dtype.itemsize == 2
    if fused:
        profile = replace(profile, layers=tuple(_fused(layer, mixers[layer.index]) for layer in profile.layers))
    head = base.get_output_embeddings()
    embeddings = {id(p) for p in (*base.get_input_embeddings().parameters(), *head.parameters())}
    parameters = list(model.parameters())
    in_layers = [list(layer.parameters()) for layer, _ in find_attentions(base).values()]
    leaves = [p for p in parameters if p.requires_grad]
    matrices = [(p, _met(p, text)) for p in parameters if p.dim() in (2, 3) and id(p) not in embeddings]
    # A depthwise convolution's weight [channels, 1, taps] is no matrix of tokens.
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    matrices = [(p, met) for p, met in matrices if id(p) not in convolutions]
    return Blueprint(
        name=f"{config.model_type}, {_in_words(values)} parameters",
        profile=profile,
        work=tuple(_work(layer, mixers[layer.index], text, fused=fused) for layer in profile.layers),
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=_nbytes(parameters),
        trained=sum(p.numel() for p in leaves),
        gradient_bytes=sum(p.numel() * max(p.element_size(), 4) for p in leaves),
        model_gradient_bytes=_nbytes(leaves),
        largest_gradient=max((p.numel() * p.element_size() for p in leaves), default=0),
        layer_bytes=max(map(_nbytes, in_layers), default=0),
        outside_bytes=_nbytes(parameters) - sum(map(_nbytes, in_layers)),
        layer_gradient=max((_nbytes(_trained(of)) for of in in_layers), default=0),
        outside_gradient=_nbytes(leaves) - sum(_nbytes(_trained(of)) for of in in_layers),
        tensors=len(parameters),
        trained_tensors=len(leaves),
        tied=head.weight is base.get_input_embeddings().weight,
        matrices=int(sum(met for _, met in matrices)),
        trained_matrices=int(sum(met for p, met in matrices if p.requires_grad)),
        head=sum(p.numel() for p in head.parameters()),
        head_trained=any(p.requires_grad for p in head.parameters()),
        element=dtype.itemsize,
        looped_experts=looped,
    )


def _nbytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad]


def _with_lora(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("--lora needs PEFT: install longstraw[peft]") from error
    lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_dropout=0.0, target_modules="all-linear")
    with warnings.catch_warnings():
        # PEFT asks transformers for this by its former name; whoever plans a step can do nothing about it.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, lora)


def _without_memory(model: nn.Module) -> None:
    """Put shapes on a CPU in the place of the model's tensors on the meta device, which autocast does not know."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty_like(old, device="cpu")
                    is_parameter = isinstance(old, nn.Parameter)
                    # The old one is held too, or its id could come again.
                    made[id(old)] = (
                        nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new,
                        old,
                    )
                table[name] = made[id(old)][0]  # type: ignore[assignment]


class _ShapeSharding(PlainSharding):
    def storages(self) -> set[int]:
        # Without memory there are no addresses; the storage objects tell tensors apart.
        return {p.untyped_storage()._cdata for _, p in self.parameters()}


class _ShapeAdapter(TransformersAdapter):
    def __init__(self, sharding: PlainSharding, config: Any, dtype: torch.dtype) -> None:
        super().__init__(sharding)
        # Values cannot be compared without memory; the real model's are.
        self._untouched_hooks = self._hooks_behind_head()
        families = [(family_of(mixer), mixer) for _, mixer in self._layers.values()]
        layers = [family.spec(mixer, config, dtype) for family, mixer in families if family is not None]
        self._latent = [layer for layer in layers if any(spec.name == "latent" for spec in layer.states)]
        self._heads: int = config.num_attention_heads
        self._top_k: int = getattr(config, "index_topk", 0)

    def run(self, forward: ForwardPass, input_ids_S: Tensor, positions_S: Tensor) -> Tensor:
        # A selection's values are read on the host, and these tensors have none. As in a recomputation, the layer
        # finds its selection and its output known already.
        tokens = len(input_ids_S)
        for layer in self._latent:
            latent = layer.spec("latent")
            shape = (tokens, self._heads, *latent.fields[0].shape)
            out = torch.empty(shape, dtype=latent.dtype)
            forward.kept[layer.index, "attention"] = (out, torch.empty(shape[:2], dtype=torch.float32))
            if any(spec.name == "index" for spec in layer.states):
                selected = min(self._top_k, tokens)
                forward.kept[layer.index, "selection"] = torch.empty(tokens, selected, dtype=torch.int32)
        return super().run(forward, input_ids_S, positions_S)


def _met(parameter: Tensor, config: Any) -> float:
    """Values of a matrix that a token is multiplied with: of stacked experts, those that it is routed to."""
    if parameter.dim() == 2:
        return float(parameter.numel())
    experts = next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)
    if experts != parameter.shape[0]:
        return float(parameter.numel())
    return parameter.numel() * float(config.num_experts_per_tok) / experts


def _fused(layer: LayerSpec, mixer: nn.Module) -> LayerSpec:
    """The layer as on a GPU: the shapes here are a CPU's, where flash-linear-attention does not run."""
    if family_of(mixer) not in _DELTA:
        return layer
    (heads, k_dim, v_dim) = layer.spec("recurrent").fields[0].shape
    return replace(layer, workspace_bytes=fla_workspace_bytes(heads, k_dim, v_dim, 2))


def _work(layer: LayerSpec, mixer: nn.Module, config: Any, *, fused: bool) -> LayerWork:
    states = {spec.name: spec for spec in layer.states}
    if "kv" in states:
        heads, head_dim = states["attention_out"].fields[0].shape
        return LayerWork(kind="attention", head_dim=head_dim, pair=4.0 * heads * head_dim)
    if "window" in states:
        rows, _, head_dim = states["window"].fields[0].shape
        heads = config.num_attention_heads
        return LayerWork(kind="window", head_dim=head_dim, pair=4.0 * heads * head_dim, sees=rows + 1)
    if "latent" in states:
        fields = {field.name: field.elements for field in states["latent"].fields}
        pair = 2.0 * config.num_attention_heads * (2 * fields["c_kv"] + fields["k_rope"])
        sparse = getattr(config, "index_topk", None) if hasattr(mixer, "indexer") else None
        scan = 2.0 * config.index_n_heads * config.index_head_dim if "index" in states else 0.0
        kind = "latent" if sparse is None else "sparse latent"
        return LayerWork(kind=kind, head_dim=fields["c_kv"], pair=pair, sees=sparse, scan=scan)
    heads, k_dim, v_dim = states["recurrent"].fields[0].shape
    assert states["recurrent"].kind is StateKind.CARRIED
    # Per head: state in and out (2 products of k_dim x v_dim), and the chunk's own triangles.
    kind = "fused recurrent" if fused and family_of(mixer) in _DELTA else "recurrent"
    return LayerWork(kind=kind, token=heads * (6.0 * k_dim * v_dim + 4.0 * _CHUNK * (k_dim + v_dim)))


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
