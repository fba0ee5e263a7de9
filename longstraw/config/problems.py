"""Turns pydantic's findings into one `ConfigError`: each problem's key path, its value and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from longstraw.errors import ConfigError

# Keys kept for a later version: no typing error, so no nearest name is offered.
NOT_IN_THIS_VERSION = {
    "context_parallel": "prompts are not yet split over ranks",
}
_TIER_KINDS = ("device", "host", "nvme")


@contextmanager
def config_error_from(model: type[BaseModel], settings: Mapping[str, Any]) -> Iterator[None]:
    """Raises `ConfigError` with every problem in place of the ValidationError raised inside."""
    try:
        yield
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in _describe_all(model, details)]
        head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{head} in the configuration:", *problems])) from None


def _describe_all(model: type[BaseModel], details: ErrorDetails) -> list[str]:
    found = [_describe(model, details)]
    if details["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(details["input"], Mapping):
        found += [_describe(model, other) for other in _under_unknown_kind(model, details)]
    return found


def _under_unknown_kind(model: type[BaseModel], details: ErrorDetails) -> Iterator[ErrorDetails]:
    """The other mistakes in a tier whose kind is none: those that are mistakes whatever the kind was to be.

    pydantic looks no further than the kind. The rest is read as the kind whose name is nearest or that has most of the
    keys.
    """
    tier, kinds = details["input"], _tier_models(model)
    near = difflib.get_close_matches(str(tier.get("kind")), kinds, n=1)
    guess = near[0] if near else max(kinds, key=lambda kind: len(kinds[kind].model_fields.keys() & tier.keys()))
    try:
        kinds[guess].model_validate({**tier, "kind": guess})
    except ValidationError as error:
        for other in error.errors():
            elsewhere = any(other["loc"][0] in section.model_fields for section in kinds.values())
            if other["type"] != "missing" and not (other["type"] == "extra_forbidden" and elsewhere):
                yield {**other, "loc": (*details["loc"], guess, *other["loc"])}


def _describe(model: type[BaseModel], details: ErrorDetails) -> str:
    # The tag of a discriminated union ("tiers", 0, "nvme", "path") is no part of the user's path.
    location = details["loc"]
    if len(location) > 2 and location[0] == "tiers" and location[2] in _TIER_KINDS:
        tag, location = str(location[2]), location[:2] + location[3:]
    else:
        tag = ""
    path = _path(location)
    value = details["input"]
    match details["type"]:
        case "extra_forbidden":
            return f"{path}: {_unknown(model, location, tag)}"
        case "missing":
            return f"{path}: missing; a tier of kind {tag} needs it" if tag else f"{path}: missing"
        case "union_tag_not_found":
            return f"{path}.kind: missing; use one of {', '.join(_TIER_KINDS)}"
        case "union_tag_invalid":
            kind = value.get("kind") if isinstance(value, Mapping) else value
            return f"{path}.kind: {_choice(kind, _TIER_KINDS)}"
        case "literal_error":
            choices = re.findall("'([^']*)'", details["ctx"]["expected"])
            return f"{path}: {_choice(value, choices)}"
        case "value_error":
            return f"{path}: {details['ctx']['error']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{path}: expected keys under it, got {value!r}"
        case "tuple_type":
            return f"{path}: expected a list of tiers, each with a kind, got {value!r}"
        case _:
            return f"{path}: {details['msg']}, got {value!r}"


def _unknown(model: type[BaseModel], location: Sequence[int | str], tag: str) -> str:
    key = str(location[-1])
    reason = NOT_IN_THIS_VERSION.get(".".join(str(part) for part in location if not isinstance(part, int)))
    if reason is not None:
        return f"not in this version: {reason}; remove the key"
    if tag:
        section = _tier_models(model)[tag]
        owners = [kind for kind, tier in _tier_models(model).items() if key in tier.model_fields]
        if owners:
            return f"belongs to tiers of kind {' and '.join(owners)}, not {tag}; remove the key"
    else:
        section = _section(model, location[:-1])
    names = list(section.model_fields)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(names)}"
    return f"unknown key; {hint}"


def _choice(value: object, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join(choices)}, got {value!r}{hint}"


def _path(location: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _section(model: type[BaseModel], parents: Sequence[int | str]) -> type[BaseModel]:
    for name in parents:
        annotation = model.model_fields[str(name)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return model


def _tier_models(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    union = get_args(model.model_fields["tiers"].annotation)[0]
    return {tier.model_fields["kind"].default: tier for tier in get_args(get_args(union)[0])}
