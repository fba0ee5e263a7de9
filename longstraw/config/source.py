"""Where settings come from: a YAML file, a mapping, another config; and how overrides are merged in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from longstraw.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader, but a key given twice is an error: the first would be ignored without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key!r} is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read(source: str | Path | Mapping[str, Any] | BaseModel | None) -> dict[str, Any]:
    """Settings as plain values, not yet checked. Raises `ConfigError` if they cannot be read."""
    if source is None:
        return {}
    if isinstance(source, BaseModel):
        return source.model_dump()
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str | Path):
        return _read_yaml(Path(source))
    raise ConfigError(
        f"a config is a YAML path, a mapping or a Config, got {type(source).__name__}; "
        "pass single keys as keyword arguments: Config.load(replay={'temperature': 0.8})"
    )


def merge(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` on top of `settings`: sections key by key, anything else replaced whole."""
    merged = dict(settings)
    for key, value in overrides.items():
        if isinstance(value, BaseModel):
            value = value.model_dump()
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = {**below, **value}
        merged[key] = value
    return merged


def to_yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); give a YAML file") from error
    try:
        settings = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}; expected keys such as 'tiers:'")
    return settings
