"""DeepSpeed ZeRO 1, 2 and 3: gradients stay with the parameters until the step's one reduction."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longstraw.collectives import CollectiveMeter, Ranks
from longstraw.errors import ConfigError, TransactionStateError, UnsupportedModelError
from longstraw.integrations.plain import LossScale, PlainSharding, saved_buffers
from longstraw.integrations.zero_order import ZeroOrder
from longstraw.integrations.zero_traffic import ZeroTraffic
from longstraw.runtime.ledger import sum_dtype
from longstraw.runtime.sharding import WeightPrint

_TOGETHER = 64 << 20
"""Bytes of weights that are gathered at once to hand their gradients over."""


def is_deepspeed(model: nn.Module) -> bool:
    """Whether the model is a DeepSpeed engine. DeepSpeed is not imported for the answer."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


class DeepSpeedSharding(PlainSharding):
    """`Sharding` of a DeepSpeed engine with ZeRO.

    `engine.coalesce_grad_reduction()` is the mode in which the caller owns the boundary: backward passes leave whole
    gradients on the parameters, and one reduction runs when it ends. Within it gradients are summed apart, in float32,
    and put back before the end.

    Args:
        engine: from `deepspeed.initialize`.
        steps: whether `engine.step()` is called when a step's gradients are whole, as `Accelerator.backward` does:
            accelerate's optimizer and scheduler do nothing under DeepSpeed.
    """

    takes_gradients = True

    def __init__(self, engine: Any, *, wide: bool, scale: LossScale | None = None, steps: bool = False) -> None:
        super().__init__(engine, wide=wide)
        import deepspeed

        if not hasattr(engine, "coalesce_grad_reduction"):
            raise UnsupportedModelError(
                f"deepspeed {deepspeed.__version__} has no coalesce_grad_reduction(), by which a step of many backward "
                "passes is reduced once; install deepspeed 0.19.8 or newer"
            )
        self._stage = int(engine.zero_optimization_stage())
        if self._stage == 0:
            raise UnsupportedModelError(
                "DeepSpeed with ZeRO stage 0; set zero_optimization.stage to 1, 2 or 3, or use DistributedDataParallel"
            )
        if engine.gradient_accumulation_steps() != 1:
            raise ConfigError(
                f"gradient_accumulation_steps: {engine.gradient_accumulation_steps()} in DeepSpeed's config: ZeRO "
                "keeps the gradient of one accumulate() only; set it to 1 and put all groups of a step inside "
                "accumulate()"
            )
        self.name = f"ZeRO-{self._stage}"
        self.lockstep = self._stage == 3
        self._engine, self._gathered = engine, deepspeed.zero.GatheredParameters
        self._steps_engine = steps
        self._open = ExitStack()
        self._collecting = False
        self._delivered_at: int | None = None
        self._group = engine.seq_data_parallel_group
        self.ranks = Ranks(dist.get_process_group_ranks(self._group))
        self._offloaded = self._stage == 3 and _is_offloaded(engine)
        self._order: ZeroOrder | None = None
        if self._stage == 3:
            self._order = ZeroOrder(engine, [p for _, p in self.parameters()])
            self._traffic = ZeroTraffic(engine.module, self.tally, replicas=self.ranks.size, offloaded=self._offloaded)

    @property
    def inner(self) -> nn.Module:
        return self._engine.module  # type: ignore[no-any-return]

    @property
    def steps(self) -> int:
        return int(self._engine.global_steps)

    def weights(self) -> tuple[WeightPrint, ...]:
        # ZeRO writes new weights behind autograd's back; its own count of steps tells of them.
        prints = [(name, 0, self.steps, p.dtype) for name, p in self.parameters()]
        return tuple(prints + [(name, b.data_ptr(), b._version, b.dtype) for name, b in saved_buffers(self.inner)])

    def device(self) -> torch.device | None:
        return torch.device(self._engine.device)

    def begin_pass(self) -> None:
        if self._order is not None:
            self._order.begin_pass()

    @property
    def rehearses(self) -> bool:  # type: ignore[override]
        return self._order is not None and not self._order.recorded and bool(self.leaves())

    def rehearse(self, out: Tensor) -> None:
        assert self._order is not None
        self._order.record(out, self.leaves(), self.backward)

    def begin_gradients(self) -> None:
        if self._collecting:
            return
        if self._delivered_at == self.steps:
            raise TransactionStateError(
                f"{self.name} holds the gradient of the last accumulate() and would drop it; call engine.step() first"
            )
        self._open.enter_context(self._engine.coalesce_grad_reduction())
        self._collecting = True

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        if self._engine.optimizer.needs_scaler():
            # The engine wants to be told that a backward pass which it does not run itself is scaled: `scale_loss` is.
            self._engine.scale(torch.zeros((), device=out.device, requires_grad=True) * 1)
        out.backward(gradient)  # type: ignore[no-untyped-call]

    def scale_loss(self, loss: Tensor) -> Tensor:
        # A loss without a graph is refused by the lane, and with a better word.
        return self._engine.scale(loss) if loss.requires_grad else loss

    @torch.no_grad()
    def finalize(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        assert self.ranks is not None
        sums = dict(sums)
        leaves = self.leaves()
        # ZeRO-3 would step once more with the last gradient that it was handed of a weight that no pass used.
        every = self._stage == 3
        used = self.ranks.any_of([every or leaf in sums for leaf in leaves])
        self.begin_gradients()
        with CollectiveMeter(self.tally):
            self._hand_over(leaves, used, sums)
            self._end_gradients()
        self._delivered_at = self.steps
        if self._steps_engine:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.step()

    def _hand_over(
        self, leaves: Sequence[nn.Parameter], used: Sequence[bool], sums: dict[nn.Parameter, Tensor]
    ) -> None:
        for together in self._runs([leaf for leaf, anywhere in zip(leaves, used, strict=True) if anywhere]):
            with self._gathered(together, enabled=self._stage == 3):
                for leaf in together:
                    self._put(leaf, sums.pop(leaf, None))

    def _put(self, leaf: nn.Parameter, whole: Tensor | None) -> None:
        optimizer = self._engine.optimizer
        if whole is None:
            whole = torch.zeros_like(leaf)
        if getattr(optimizer, "use_grad_accum_attribute", False):
            leaf.grad_accum = whole.to(optimizer.gradient_accumulation_dtype)  # type: ignore[attr-defined]
        else:
            leaf.grad = whole.to(leaf.dtype)

    def _runs(self, leaves: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        run: list[nn.Parameter] = []
        held = 0
        for leaf in leaves:
            size = _numel(leaf) * leaf.dtype.itemsize
            if run and held + size > _TOGETHER:
                yield run
                run, held = [], 0
            run.append(leaf)
            held += size
        if run:
            yield run

    def _end_gradients(self) -> None:
        self._collecting = False
        self._open.close()

    def end_step(self, *, failed: bool) -> None:
        if self._collecting:
            # No gradient is there to be reduced; what is left of the passes is forgotten.
            self._end_gradients()
            self._engine.optimizer.zero_grad()
        if self._order is not None:
            self._order.let_go()

    def storages(self) -> Container[int]:
        return super().storages() if self._order is None else self._order

    def gradient_bytes(self) -> int:
        return sum(_numel(leaf) * sum_dtype(leaf, wide=self._wide).itemsize for leaf in self.leaves())

    def link_bytes_a_parameter(self) -> float:
        if not self._offloaded:
            return 0.0
        assert self.ranks is not None
        whole = sum(_numel(p) * p.element_size() for _, p in self.parameters())
        return whole / sum(_numel(p) for _, p in self.parameters()) / self.ranks.size

    def describe(self) -> str:
        assert self.ranks is not None
        return (
            f"gradients: {self.name} over {self.ranks.size} ranks, reduced once a step; each rank holds "
            f"{self.gradient_bytes()} bytes of them until then"
        )


def _is_offloaded(engine: Any) -> bool:
    """Whether weights come to a device from host memory, or from disk."""
    settings = engine.zero_offload_param()
    if settings is None or torch.device(engine.device).type == "cpu":
        return False
    # DeepSpeed's settings hold the member of its enum, or the text that the user wrote.
    return str(getattr(settings.device, "value", settings.device)) != "none"


def _numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, also while ZeRO-3 has taken its data away."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
