"""Whatever configuration can be made can be written down and read back, in every spelling."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_krul.config import (
    ChunkConfig,
    Config,
    MemoryConfig,
    PauseConfig,
    RestoreConfig,
    SessionConfig,
    SsdConfig,
    load_config,
    parse_config,
    to_mapping,
)
from sgl_krul.errors import ConfigError
from sgl_krul.values import format_duration, format_size, parse_duration, parse_size

SIZES = st.integers(min_value=1, max_value=2**63 - 1)
SECONDS = st.floats(min_value=1, max_value=36500 * 86400.0)
# Surrogates cannot be written to a file, and NUL cannot be in a path.
PATH_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)

# A busy machine is slow, and that is no fault of the code.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CONFIGS = st.builds(
    Config,
    memory=st.builds(MemoryConfig, capacity_bytes=SIZES),
    ssd=st.none()
    | st.builds(
        SsdConfig,
        path=PATH_TEXT.map(lambda text: Path("/" + text)),
        capacity_bytes=SIZES,
        free_space_floor_bytes=st.just(0) | SIZES,
        fsync=st.sampled_from(["always", "commit", "never"]),
    ),
    chunk=st.builds(ChunkConfig, tokens=st.integers(1, 2**16).map(lambda pages: pages * 16)),
    session=st.builds(
        SessionConfig,
        idle_pause_s=st.just(0.0) | SECONDS,
        hold_deadline_s=SECONDS,
        busy_timeout_s=SECONDS,
        stale_ttl_s=SECONDS,
    ),
    restore=st.builds(
        RestoreConfig, workers=st.integers(1, 64), max_layer_wait_s=st.floats(min_value=0, max_value=1)
    ),
    pause=st.builds(PauseConfig, workers=st.integers(1, 64)),
)

VALUES = (
    st.sampled_from([None, True, [], [1], {"tokens": 1}, "", "1GiB", "1h", "~", "$X", "/a", "always", b"x"])
    | st.integers()
    | st.floats()
    | PATH_TEXT
)
NAMES = st.sampled_from([*to_mapping(Config()), "path", "capacity_bytes", "tokens", "workers", "fsync"])


@calm
@given(CONFIGS)
def test_a_config_survives_its_mapping(config: Config) -> None:
    assert parse_config(to_mapping(config), "test", {"HOME": "/h"}) == config


@calm
@given(CONFIGS)
def test_a_config_survives_a_yaml_file(config: Config) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "krul.yaml"
        path.write_text(yaml.safe_dump(to_mapping(config), allow_unicode=False), encoding="utf-8")
        assert load_config(path, {"HOME": "/h"}) == config


@calm
@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3) | VALUES, max_size=3))
def test_any_mapping_is_read_or_refused(mapping: dict[str, object]) -> None:
    try:
        config = parse_config(mapping, "test", {"HOME": "/h"})
    except ConfigError:
        return
    assert parse_config(to_mapping(config), "test", {"HOME": "/h"}) == config


@calm
@given(st.binary(max_size=60))
def test_any_file_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "krul.yaml"
        path.write_bytes(content)
        with contextlib.suppress(ConfigError):
            load_config(path, {"HOME": "/h"})


@calm
@given(st.integers(0, 1023), st.integers(0, 5))
def test_whole_units_survive_exactly(count: int, power: int) -> None:
    assert parse_size(format_size(count * 1024**power)) == count * 1024**power


@calm
@given(st.integers(0, 2**60))
def test_any_size_survives_to_one_decimal(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


@calm
@given(st.integers(0, 2**60))
def test_a_number_of_bytes_reads_as_itself(size_bytes: int) -> None:
    assert (
        parse_size(size_bytes) == parse_size(str(size_bytes)) == parse_size(f"{size_bytes:_}") == size_bytes
    )


@calm
@given(st.floats(min_value=0, max_value=1e8))
def test_any_duration_survives_to_two_units(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == pytest.approx(duration_s, rel=0.051, abs=1e-7)


@calm
@given(st.integers(1, 29), st.integers(0, 23))
def test_days_and_hours_survive_exactly(days: int, hours: int) -> None:
    seconds = days * 86400 + hours * 3600
    assert parse_duration(format_duration(seconds)) == parse_duration(f"{days}d{hours}h") == seconds
