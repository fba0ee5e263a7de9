"""The public face: a runtime around the user's own model and training loop."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from longstraw.config import Config
from longstraw.errors import ConfigError
from longstraw.integrations import adapt
from longstraw.progress import terminal_progress
from longstraw.runtime.engine import Engine
from longstraw.runtime.narrowing import Narrowing
from longstraw.runtime.transaction import Transaction


class _Same(enum.Enum):
    AS_TRAINED = "as trained"


class Runtime:
    """Long-context training steps for one model.

    Args:
        model: a causal LM of a supported family, wrapped or not (PEFT, `Accelerator.prepare`).
        config: path of a YAML file, a mapping with the same keys, a `Config`, or None for the defaults.
        accelerator: the `accelerate.Accelerator` that prepared the model, if one did.
        **overrides: top-level settings on top of `config`.

    Raises:
        ConfigError: a setting is unknown, impossible or would be ignored; all problems are listed at once.
        UnsupportedModelError: the model has a part that cannot be carried exactly. Nothing was run.
    """

    def __init__(
        self,
        model: nn.Module,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        accelerator: Any | None = None,
        **overrides: Any,
    ) -> None:
        self.config = Config.load(config, **overrides)
        adapted = adapt(model, accelerator, self.config)
        self._engine = Engine(adapted, self.config, progress=terminal_progress)
        self._references: dict[nn.Module, Engine] = {}
        self._narrowings: WeakKeyDictionary[nn.Module, Narrowing] = WeakKeyDictionary()

    def transaction(self, prompt_ids: Tensor, *, row_tokens: int | None = None) -> Transaction:
        """A transaction on one prompt; entering it captures.

        Args:
            prompt_ids: int64 [P], unpadded, on any device.
            row_tokens: for models whose rotary frequencies depend on the row's length (dynamic NTK, LongRoPE past the
                original length): compute them as for rows of this many tokens, as a padded batch would.
        """
        return self._engine.transaction(prompt_ids, row_tokens)

    def accumulate(self) -> AbstractContextManager[None]:
        """The groups of one optimizer step: gradients of all transactions within reach `.grad` together at the end.

        An error that leaves the block drops what its transactions summed; `.grad` is as it was on entry.
        """
        return self._engine.accumulate()

    def score(
        self,
        prompt_ids: Tensor,
        responses: Sequence[Tensor],
        *,
        model: nn.Module | None = None,
        adapter: _Same | None = _Same.AS_TRAINED,
        row_tokens: int | None = None,
    ) -> list[Tensor]:
        """Log-probs of responses from a capture of its own, for a reference policy: capture, score, free.

        Args:
            prompt_ids: int64 [P].
            responses: int64 [R_i] each.
            model: another model, on the same device; None for the trained one.
            adapter: None to score under a PEFT model's base, without its adapters.
            row_tokens: as for `transaction`.

        Returns:
            For each response float32 [R_i] (float64 for a float64 model), nats, after temperature.
        """
        self._engine.require_open("score")
        with ExitStack() as stack:
            engine = self._engine if model is None else stack.enter_context(self._reference_engine(model))
            if adapter is None:
                # The transaction is made within the reference policy: its profile is that policy's.
                stack.enter_context(engine.adapter.reference())
            transaction = engine.transaction(prompt_ids, row_tokens, score_only=True, reference=adapter is None)
            return stack.enter_context(transaction).score(responses)

    @contextmanager
    def _reference_engine(self, model: nn.Module) -> Iterator[Engine]:
        """An engine on the trained model's pages, for one call. That of a sharded model is kept: it has groups of
        processes."""
        if model in self._references:
            yield self._references[model]
            return
        own = self._engine
        adapted = adapt(model, None, self.config)
        if adapted.device != own.device:
            raise ConfigError(
                f"model: the reference model is on {adapted.device}, the trained one on {own.device}; "
                "move it there, or score with a Runtime of its own"
            )
        engine = Engine(adapted, self.config, store=own.store)
        if adapted.sharding.ranks is not None:
            self._references[model] = engine
            yield engine
            return
        engine.narrowing = self._narrowings.setdefault(model, engine.narrowing)
        try:
            yield engine
        finally:
            engine.close()

    def describe(self) -> str:
        """How gradients are reduced and what that costs, the tiers with their budgets in bytes, and every setting."""
        lines = [self._engine.sharding.describe(), *(pager.describe() for pager in self._engine.store.pagers)]
        return "\n".join(f"# {line}" for line in lines) + f"\n{self.config.describe()}"

    def close(self) -> None:
        """Free all tiers. The runtime cannot be used afterwards.

        Raises TransactionStateError inside a transaction or `accumulate()`.
        """
        with ExitStack() as stack:
            for engine in (*self._references.values(), self._engine):
                stack.callback(engine.close)
        self._references.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Runtime cannot be copied or pickled: it owns tiers, files and hooks; make another around the other model"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
