"""docs/configuration.md and the model agree: the same keys, and the same defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from longstraw.config import Config, DeviceTier, HostTier, NvmeTier, parse_bytes
from longstraw.config.problems import NOT_IN_THIS_VERSION

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z_.\[\]]+)` \| .*? \| (.*?) \| ", TEXT, flags=re.MULTILINE))

REQUIRED = "required"


def defaults() -> dict[str, object]:
    """Each key's path with its default."""
    found: dict[str, object] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.default, BaseModel):
            for key, value in field.default.model_dump().items():
                found[f"{name}.{key}"] = value
        elif name == "tiers":
            for tier in (DeviceTier, HostTier, NvmeTier):
                for key, tier_field in tier.model_fields.items():
                    found[f"tiers[].{key}"] = REQUIRED if key in ("kind", "path") else tier_field.default
        else:
            found[name] = field.default
    return found


def test_every_key_is_explained_and_no_other() -> None:
    assert set(ROWS) == set(defaults())


@pytest.mark.parametrize(("key", "default"), sorted(defaults().items(), key=lambda item: item[0]))
def test_defaults_agree(key: str, default: object) -> None:
    if default is REQUIRED:
        assert ROWS[key].startswith("required")
    else:
        written = yaml.safe_load(ROWS[key].strip("`"))
        assert (parse_bytes(written) if isinstance(default, int) and isinstance(written, str) else written) == default


def test_the_yaml_is_the_defaults() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert yaml.safe_load(block) == Config().to_dict()


def test_keys_that_are_not_in_this_version_are_named() -> None:
    section = TEXT.split("## Not in this version")[1]
    named = {key.replace("[]", "") for key in re.findall(r"`([a-z_.\[\]]+)`", section)}
    assert named == set(NOT_IN_THIS_VERSION)
