"""The configuration: where it comes from, what it refuses, and that a refusal names key, value and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from longstraw.config import Config, DeviceTier, HostTier, NvmeTier
from longstraw.config.problems import NOT_IN_THIS_VERSION
from longstraw.errors import ConfigError


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(settings)
    return str(caught.value)


def test_defaults() -> None:
    config = Config.load()
    assert config.gradient.prompt == "exact"
    assert config.gradient.accumulate == "float32"
    assert config.replay.temperature == 1.0
    assert config.tiers == (DeviceTier(), HostTier())
    assert config == Config()


def test_yaml_mapping_and_keywords_agree(tmp_path: Path) -> None:
    path = tmp_path / "paging.yaml"
    path.write_text("pages: {tokens: 64}\ntiers:\n  - {kind: host, budget: 2GiB}\n")
    settings = {"pages": {"tokens": 64}, "tiers": [{"kind": "host", "budget": 2 * 2**30}]}
    assert Config.load(path) == Config.load(str(path)) == Config.load(settings) == Config(**settings)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert Config.load(path) == Config()


def test_overrides_merge_sections_and_replace_tiers() -> None:
    base = Config.load({"replay": {"temperature": 0.5, "entropy": True}, "tiers": [{"kind": "host"}]})
    config = Config.load(base, replay={"temperature": 0.8}, tiers=[{"kind": "device"}])
    assert config.replay.entropy is True
    assert config.replay.temperature == 0.8
    assert config.tiers == (DeviceTier(),)


def test_description_reads_back(tmp_path: Path) -> None:
    tiers = [{"kind": "device", "budget": "1GiB"}, {"kind": "nvme", "path": str(tmp_path), "budget": 5}]
    config = Config.load(tiers=tiers, capture={"chunk_tokens": 7}, staleness=2)
    path = tmp_path / "described.yaml"
    path.write_text(config.describe())
    assert Config.load(path) == config
    assert isinstance(config.tiers[1], NvmeTier)


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().pages.tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradeint": {}}, ["gradeint: unknown key", "'gradient'"]),
        ({"pages": {"token": 4}}, ["pages.token: unknown key", "'tokens'"]),
        ({"pages": {"zzz": 4}}, ["pages.zzz: unknown key", "tokens, block_tokens, lookahead"]),
        ({"gradient": {"prompt": "exakt"}}, ["gradient.prompt", "'exakt'", "exact, detached"]),
        ({"capture": {"chunk_tokens": 0}}, ["capture.chunk_tokens", "at least 1", "got 0"]),
        ({"capture": {"chunk_tokens": True}}, ["capture.chunk_tokens", "got True"]),
        ({"capture": {"chunk_tokens": "8"}}, ["capture.chunk_tokens", "got '8'"]),
        ({"replay": {"temperature": 0}}, ["replay.temperature", "above 0"]),
        ({"replay": {"temperature": float("nan")}}, ["replay.temperature", "nan"]),
        ({"replay": {"checkpoint": "yes"}}, ["replay.checkpoint", "true or false", "'yes'"]),
        ({"replay": {"entropy": 1}}, ["replay.entropy", "true or false"]),
        ({"replay": 3}, ["replay: expected keys under it", "3"]),
        ({"pages": {"tokens": 100, "block_tokens": 250}}, ["pages.block_tokens: 250", "multiple", "use 200"]),
        ({"pages": {"tokens": 100, "block_tokens": 10}}, ["pages.block_tokens: 10", "use 100"]),
        ({"pages": {"lookahead": 0}}, ["pages.lookahead", "at least 1"]),
        ({"staleness": -1}, ["staleness", "at least 0", "-1"]),
        ({"tiers": []}, ["tiers", "at least one tier"]),
        ({"tiers": "device"}, ["tiers", "list of tiers"]),
        ({"tiers": [{"budget": 1}]}, ["tiers[0].kind: missing", "device, host, nvme"]),
        ({"tiers": [{"kind": "gpu"}]}, ["tiers[0].kind", "'gpu'"]),
        ({"tiers": [{"kind": "hst", "path": "/x"}]}, ["1 problem in", "tiers[0].kind"]),
        ({"tiers": [{"kind": "host"}, {"kind": "device"}]}, ["tiers", "reorder to device, host"]),
        ({"tiers": [{"kind": "host"}, {"kind": "host"}]}, ["tiers: 2 host tiers", "sum of their budgets"]),
        ({"tiers": [{"kind": "nvme"}]}, ["tiers[0].path: missing", "nvme"]),
        ({"tiers": [{"kind": "host", "path": "/x"}]}, ["tiers[0].path", "kind nvme", "remove"]),
        ({"tiers": [{"kind": "host", "numa": -1}]}, ["tiers[0].numa", "'off'", "-1"]),
        ({"tiers": [{"kind": "host", "pinned": "yes"}]}, ["tiers[0].pinned", "'auto'", "'yes'"]),
        ({"tiers": [{"kind": "nvme", "path": "/x", "pinned": True}]}, ["tiers[0].pinned", "kind host"]),
        ({"tiers": [{"kind": "nvme", "path": "/x", "engine": "posx"}]}, ["tiers[0].engine", "did you mean 'posix'"]),
        ({"tiers": [{"kind": "nvme", "path": "/x", "block": "100KiB"}]}, ["tiers[0].block", "64KiB"]),
        (
            {"tiers": [{"kind": "nvme", "path": "/x", "engine": "posix", "queue_depth": 8}]},
            ["tiers[0].queue_depth: 8", "threads"],
        ),
        (
            {"tiers": [{"kind": "nvme", "path": "/x", "engine": "deepspeed", "checksum": False}]},
            ["tiers[0].checksum", "failed writes"],
        ),
        ({"tiers": [{"kind": "device", "checksum": True}]}, ["tiers[0].checksum", "kind nvme"]),
        ({"tiers": [{"kind": "host", "budget": -1}]}, ["tiers[0].budget", "negative", "-1"]),
        ({"tiers": [{"kind": "host", "budget": "3 parsecs"}]}, ["tiers[0].budget", "'parsecs'", "GiB"]),
        ({"tiers": [{"kind": "device", "budget": 0}]}, ["tiers: every budget is 0"]),
        (
            {"tiers": [{"kind": "nvme", "path": "/x"}, {"kind": "nvme", "path": "/x"}]},
            ["tiers: two nvme tiers share a path"],
        ),
    ],
)
def test_refused(settings: dict[str, Any], words: list[str]) -> None:
    message = refusal(**settings)
    assert message.startswith("1 problem in the configuration")
    for word in words:
        assert word in message


def test_every_problem_at_once() -> None:
    message = refusal(
        staleness=-1,
        pages={"token": 1, "lookahead": 0},
        tiers=[{"kind": "host", "path": "/x"}, {"kind": "no"}],
    )
    assert message.startswith("5 problems")
    for path in ("staleness", "pages.token", "pages.lookahead", "tiers[0].path", "tiers[1].kind"):
        assert f"\n  {path}: " in message


@pytest.mark.parametrize("key", sorted(NOT_IN_THIS_VERSION))
def test_keys_of_the_design_that_are_not_in_this_version(key: str) -> None:
    match key.split("."):
        case ["tiers", name]:
            message = refusal(tiers=[{"kind": "host", name: "auto"}])
        case [section, name]:
            message = refusal(**{section: {name: "auto"}})
        case _:
            message = refusal(**{key: None})
    assert "not in this version" in message
    assert "unknown" not in message


@pytest.mark.parametrize("call", [{"replay": {"temprature": 1}}, {"stalenes": 1}])
def test_keyword_arguments_raise_the_same_error(call: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        Config(**call)
    with pytest.raises(ConfigError, match="did you mean"):
        Config.load(None, **call)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml.*No such file"):
        Config.load(tmp_path / "missing.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("pages: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml is not valid YAML"):
        Config.load(bad)
    bad.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds a list"):
        Config.load(bad)
    # A plain SafeLoader keeps the second and drops the first.
    bad.write_text("staleness: 1\nstaleness: 0\n")
    with pytest.raises(ConfigError, match=r"line 2: key 'staleness' is given twice"):
        Config.load(bad)
    with pytest.raises(ConfigError, match="got int"):
        Config.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", ["object/apply:os.mkdir", "object/new:os.mkdir", "name:os.mkdir"])
def test_a_file_runs_nothing(tmp_path: Path, tag: str) -> None:
    made, path = tmp_path / "made", tmp_path / "paging.yaml"
    path.write_text(f"trace: !!python/{tag} ['{made}']\n")
    with pytest.raises(ConfigError, match=r"paging\.yaml is not valid YAML.*could not determine a constructor"):
        Config.load(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        (
            {"kind": "nvm", "path": "/x", "budgte": 1, "block": "100KiB", "engine": "posx"},
            [
                "4 problems",
                "'nvme'",
                "tiers[0].budgte: unknown key; did you mean 'budget'",
                "tiers[0].block",
                "'posix'",
            ],
        ),
        ({"budget": "3 parsecs"}, ["2 problems", "tiers[0].kind: missing", "tiers[0].budget", "'parsecs'"]),
        ({"kind": "disk", "pinned": "no"}, ["2 problems", "tiers[0].kind", "tiers[0].pinned", "'no'"]),
    ],
)
def test_an_unknown_kind_hides_nothing(tier: dict[str, Any], words: list[str]) -> None:
    message = refusal(tiers=[tier])
    assert all(word in message for word in words), message
