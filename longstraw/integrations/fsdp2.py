"""FSDP2 (`fully_shard`): parameters that are gathered by hooks around each module's forward and backward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from longstraw.collectives import CollectiveMeter, Ranks
from longstraw.errors import UnsupportedModelError
from longstraw.integrations.fsdp2_passes import PassParameters
from longstraw.integrations.fsdp2_traffic import Unit, UnitTraffic, link_bytes
from longstraw.integrations.plain import LossScale, PlainSharding, saved_buffers
from longstraw.runtime.ledger import add_to_gradients, sum_dtype
from longstraw.runtime.sharding import WeightPrint


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to some part of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Fsdp2Sharding(PlainSharding):
    """`Sharding` of a model under `fully_shard`, with any wrapping.

    Passes run through FSDP2's own hooks. Where a pass's gradients go is the difference between the two modes:

    - deferred: autograd adds to the gathered parameters. A hook takes their gradients before FSDP2 looks for them, so
      that it has nothing to reduce; the whole sums are reduce-scattered once, when the step ends, as DTensors with a
      partial placement become sharded ones.
    - each_pass: FSDP2 reduces in each backward pass, and its shards are summed.

    All of it is public: `unshard` and `reshard`, hooks on parameters, and DTensor.
    """

    name = "FSDP2"
    lockstep = True
    casts_outputs = True

    def __init__(self, model: nn.Module, *, reduce: str, wide: bool, scale: LossScale | None = None) -> None:
        super().__init__(model, wide=wide, scale=scale)
        self.reduce = reduce
        self.takes_gradients = reduce == "deferred"
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not isinstance(model, FSDPModule):
            raise UnsupportedModelError(
                "fully_shard was applied to parts of the model, but not to the model itself, whose hooks tie them "
                "together; call fully_shard(model) last"
            )
        _refuse_torn_embeddings(model)
        self._reshard()
        self._sharded = dict(model.named_parameters())
        self.ranks = Ranks(_members(self._sharded))
        self._gathered = self._find_gathered()
        self._traffic = self._watch_units()
        self._passes = self._watch_passes()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _find_gathered(self) -> dict[str, nn.Parameter]:
        """The parameters that stand in for the sharded ones in a pass: they stay the same objects from pass to pass."""
        found: dict[str, nn.Parameter] = {}
        modules: dict[tuple[str, ...], list[FSDPModule]] = {}
        for unit in self._units:
            unit.unshard()
            names = []
            for name, parameter in self._model.named_parameters():
                if parameter is not self._sharded.get(name):
                    found[name] = parameter
                    names.append(name)
            unit.reshard()
            if names:
                modules.setdefault(tuple(names), []).append(unit)
        self._parts = [Unit(modules=tuple(of), names=names) for names, of in modules.items()]
        missing = [name for name, p in self._sharded.items() if isinstance(p, DTensor) and name not in found]
        split = [name for name, p in found.items() if isinstance(p, DTensor)]
        if split:
            raise UnsupportedModelError(
                f"{split[0]} is sharded by another framework beside FSDP2 (tensor parallelism); pass a model that only "
                "FSDP2 shards"
            )
        if missing:
            raise UnsupportedModelError(
                f"torch {torch.__version__}: FSDP2's unshard() leaves {missing[0]} sharded, where the releases from "
                "2.11 to 2.13 gather it; use one of those"
            )
        return found

    def _watch_units(self) -> UnitTraffic:
        device = self.device()
        assert device is not None
        return UnitTraffic(
            self._model,
            self._parts,
            self._sharded,
            self._gathered,
            device,
            self.tally,
            reduces=self.reduce == "each_pass",
        )

    def _watch_passes(self) -> PassParameters | None:
        return PassParameters(self._parts, self._gathered) if self.reduce == "each_pass" else None

    def device(self) -> torch.device | None:
        mesh = next(p.device_mesh for p in self._sharded.values() if isinstance(p, DTensor))
        if mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return list(self._sharded.items())

    def leaves(self) -> Sequence[nn.Parameter]:
        # What FSDP2 was told to ignore is never gathered, and left to the user to reduce.
        stand_ins: Mapping[str, nn.Parameter] = self._gathered if self.reduce == "deferred" else {}
        return [stand_ins.get(name, p) for name, p in self._sharded.items() if p.requires_grad]

    def storages(self) -> set[int]:
        # Gathered parameters move: they are counted, in short runs and in long ones alike.
        return set()

    @torch.no_grad()
    def weights(self) -> tuple[WeightPrint, ...]:
        prints = []
        for name, parameter in self._sharded.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            prints.append((name, local.data_ptr(), local._version, parameter.dtype))
        # FSDP2 leaves buffers alone.
        prints += [(name, b.data_ptr(), b._version, b.dtype) for name, b in saved_buffers(self._model)]
        return tuple(prints)

    def layout(self) -> Hashable:
        return tuple((p.requires_grad, p.dtype, p.device) for p in self._sharded.values())

    def begin_step(self) -> None:
        self._reshard()
        # Loading a checkpoint may have put other parameter objects in place.
        now = dict(self._model.named_parameters())
        if any(now.get(name) is not parameter for name, parameter in self._sharded.items()):
            self._sharded = now
            self._gathered = self._find_gathered()
            self._traffic = self._watch_units()
            self._passes = self._watch_passes()
        if self._passes is not None:
            self._passes.begin_step()

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        super().backward(out, gradient)
        if self._passes is not None:
            self._passes.end_pass()

    @torch.no_grad()
    def finalize(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        if self.reduce == "each_pass":
            add_to_gradients(sums)
            return
        assert self.ranks is not None
        trained = [(name, p) for name, p in self._sharded.items() if p.requires_grad]
        leaves = [self._gathered.get(name, p) for name, p in trained]
        used = self.ranks.any_of([leaf in sums for leaf in leaves])
        for (_, parameter), leaf, anywhere in zip(trained, leaves, used, strict=True):
            if not anywhere:
                continue
            whole = sums.get(leaf)
            if not isinstance(parameter, DTensor):
                if whole is not None:
                    add_to_gradients({parameter: whole})
                continue
            if whole is None:
                whole = torch.zeros(parameter.shape, dtype=sum_dtype(leaf, wide=self._wide), device=self.device())
            with CollectiveMeter(self.tally):
                shard = _scatter_mean(whole, parameter)
            _add_shard(parameter, shard)
            self.tally.gradients_to_host += link_bytes(parameter, shard.device)

    def end_step(self, *, failed: bool) -> None:
        if failed:
            # An interrupted pass leaves FSDP2 in the middle of its own.
            reset = getattr(self._model, "reset_iter_state", None)
            if reset is not None:
                reset()
        self._reshard()

    def gradient_bytes(self) -> int:
        if self.reduce == "each_pass":
            locals_ = [(p, p.to_local()) for p in self.leaves() if isinstance(p, DTensor)]
            return sum(local.numel() * sum_dtype(p, wide=self._wide).itemsize for p, local in locals_)
        return super().gradient_bytes()

    def link_bytes_a_parameter(self) -> float:
        device = self.device()
        assert device is not None
        crossing = sum(link_bytes(parameter, device) for parameter in self._sharded.values())
        return crossing / max(sum(parameter.numel() for parameter in self._sharded.values()), 1)

    def describe(self) -> str:
        assert self.ranks is not None
        when = "reduced once a step" if self.reduce == "deferred" else "reduced in each backward pass"
        return (
            f"gradients: FSDP2 over {self.ranks.size} ranks, {when}; each rank holds {self.gradient_bytes()} bytes of "
            "them until the step ends"
        )


def _scatter_mean(whole: Tensor, parameter: DTensor) -> Tensor:
    """This rank's shard of the mean over replicas of `whole`, in its dtype."""
    mesh = parameter.device_mesh
    partial = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.redistribute(mesh, parameter.placements).to_local().div_(mesh.size())


def _add_shard(parameter: nn.Parameter, shard: Tensor) -> None:
    """Add this rank's shard to its part of `.grad`, which is on the CPU where the parameter is offloaded."""
    if parameter.grad is None:
        gradient = torch.empty_like(parameter)
        assert isinstance(gradient, DTensor)
        gradient.to_local().copy_(shard)
        parameter.grad = gradient
    else:
        assert isinstance(parameter.grad, DTensor)
        local = parameter.grad.to_local()
        local.copy_(shard.to(local.device).add_(local))


def _refuse_torn_embeddings(model: nn.Module) -> None:
    """Tied embeddings in two units become two parameters, without a word from torch before 2.13."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    tied = getattr(getattr(base, "config", None), "tie_word_embeddings", False)
    if not tied or not hasattr(base, "get_output_embeddings"):
        return
    head = base.get_output_embeddings()
    if head is not None and head.weight is not base.get_input_embeddings().weight:
        raise UnsupportedModelError(
            f"{type(base).__name__}: config.tie_word_embeddings is true, but fully_shard made two parameters of the "
            "embedding and the head; put both into one unit, fully_shard([embed_tokens, lm_head]), or leave both to "
            "the root, or set tie_word_embeddings to false"
        )


def _members(parameters: Mapping[str, nn.Parameter]) -> list[int]:
    """The global ranks over which parameters are sharded or replicated."""
    meshes = {p.device_mesh for p in parameters.values() if isinstance(p, DTensor)}
    members = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    if len(members) != 1:
        raise UnsupportedModelError(
            f"the model is sharded over {len(members)} different sets of ranks; use one device mesh for all of it"
        )
    assert dist.get_rank() in next(iter(members))
    return list(next(iter(members)))
