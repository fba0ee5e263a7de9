"""The README's loop runs as it is written, and its YAML has exactly the keys that there are."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from longstraw import Config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return str(found)


def test_the_loop_trains(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paging.yaml").write_text("pages: {tokens: 16}\n")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def group() -> SimpleNamespace:
        draw = [torch.randint(0, 61, (length,), generator=generator) for length in (40, 5, 1, 3)]
        return SimpleNamespace(prompt_ids=draw[0], responses=draw[1:], rewards=torch.tensor([1.0, 0.0, 0.5]))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scope: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "batches": [[group(), group()]],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(block("python"), scope)
    assert scope["txn"].report.branches == 3
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_the_yaml_has_every_key(tmp_path: Path) -> None:
    settings = yaml.safe_load(block("yaml"))
    config = Config.load(settings)
    written = config.to_dict()
    assert {key: set(part) for key, part in written.items() if isinstance(part, dict)} == {
        key: set(part) for key, part in settings.items() if isinstance(part, dict)
    }
    assert written.keys() == settings.keys()
    assert [set(tier) for tier in written["tiers"]] == [set(tier) for tier in settings["tiers"]]
    # Apart from the tiers' budgets and disk, what is shown is the default.
    assert config.model_copy(update={"tiers": Config().tiers}) == Config()


def test_its_links_and_commands_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / link).is_file(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
