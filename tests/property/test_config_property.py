"""Whatever configuration can be made can be written down and read back, in every spelling."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_krul.config import (
    ChunkConfig,
    Config,
    LinkConfig,
    MemoryConfig,
    PauseConfig,
    PlacementConfig,
    RedisConfig,
    RestoreConfig,
    SessionConfig,
    SsdConfig,
    TenantRuleConfig,
    TenantsConfig,
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
# Dollar signs and braces in plenty: they mean something to the reader.
TEXT = st.text(st.sampled_from("${}_aB1~ \n'\"#:") | st.characters(exclude_categories=["Cs"]), max_size=12)
FULL_TEXT = TEXT.filter(bool)
FRACTIONS = st.floats(min_value=0, max_value=1, exclude_min=True)

# A busy machine is slow, and that is no fault of the code.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SSD = st.builds(
    SsdConfig,
    path=PATH_TEXT.map(lambda text: Path("/" + text)),
    capacity_bytes=SIZES,
    free_space_floor_bytes=st.just(0) | SIZES,
    fsync=st.sampled_from(["always", "commit", "never"]),
    daily_write_bytes=st.just(0) | SIZES,
)
REDIS = st.builds(
    RedisConfig,
    url=FULL_TEXT,
    username=st.none() | FULL_TEXT,
    password=st.none() | FULL_TEXT,
    tls_ca_file=st.none() | PATH_TEXT.map(lambda text: Path("/" + text)),
    key_prefix=FULL_TEXT,
    capacity_bytes=SIZES,
    ttl_s=st.floats(min_value=60, max_value=36500 * 86400.0),
    timeout_s=st.floats(min_value=0.01, max_value=60),
    connect_timeout_s=st.floats(min_value=0.01, max_value=60),
    connections=st.integers(1, 256),
    max_in_flight_bytes=st.integers(1 << 20, 2**63 - 1),
    lease_s=st.floats(min_value=1, max_value=3600),
)
LINK = st.builds(
    LinkConfig,
    bytes_per_s=SIZES,
    latency_s=st.floats(min_value=0, max_value=60),
    jitter=st.just(0.0) | FRACTIONS,
    seed=SIZES,
    change_after_bytes=st.just(0) | SIZES,
    change_to_bytes_per_s=st.just(0) | SIZES,
    dead_after_s=st.floats(min_value=0, max_value=3600),
)
RULES = st.lists(
    st.builds(TenantRuleConfig, prefix=FULL_TEXT, tenant=FULL_TEXT, quota_bytes=st.just(0) | SIZES),
    max_size=4,
    unique_by=(lambda rule: rule.prefix, lambda rule: rule.tenant),
)
TENANTS = st.builds(
    TenantsConfig, separator=TEXT, quota_bytes=st.just(0) | SIZES, rules=RULES.map(lambda rules: tuple(rules))
)


@st.composite
def placements(draw: st.DrawFn, replicate: list[str]) -> PlacementConfig:
    low, high = sorted([draw(FRACTIONS), draw(FRACTIONS)])
    return draw(
        st.builds(
            PlacementConfig,
            replicate=st.sampled_from(replicate),
            memory_max_bytes=st.just(0) | SIZES,
            memory_age_s=SECONDS,
            demote_after_s=st.just(0.0) | SECONDS,
            high_watermark=st.just(high),
            low_watermark=st.just(low),
            interval_s=SECONDS,
        )
    )


@st.composite
def tiers(draw: st.DrawFn) -> dict[str, object]:
    """The sections ssd, redis, placement and link; together they make sense."""
    ssd, redis = draw(st.none() | SSD), draw(st.none() | REDIS)
    there = [name for name, section in (("ssd", ssd), ("redis", redis)) if section is not None]
    choices = [*there, "both"] if len(there) == 2 else there or ["ssd"]
    link = draw(st.none() | LINK) if ssd is not None else None
    return {"ssd": ssd, "redis": redis, "placement": draw(placements(choices)), "link": link}


BARE = st.builds(
    Config,
    memory=st.builds(MemoryConfig, capacity_bytes=SIZES, prefault_bytes=st.just(0) | SIZES),
    tenants=TENANTS,
    chunk=st.builds(ChunkConfig, tokens=st.integers(1, 2**16).map(lambda pages: pages * 16)),
    session=st.builds(
        SessionConfig,
        idle_pause_s=st.just(0.0) | SECONDS,
        hold_deadline_s=SECONDS,
        busy_timeout_s=SECONDS,
        stale_ttl_s=SECONDS,
        ttl_s=st.just(0.0) | SECONDS,
    ),
    restore=st.builds(
        RestoreConfig,
        workers=st.integers(1, 64),
        max_layer_wait_s=st.floats(min_value=0, max_value=1),
        strategy=st.sampled_from(["optimal", "load", "recompute", "half", "paper"]),
        recompute=st.booleans(),
        max_slice_tokens=st.integers(1, 2**16).map(lambda pages: pages * 16),
        max_step_s=st.floats(min_value=0.001, max_value=10),
        staging_bytes=st.integers(1 << 20, 2**63 - 1),
        rates_file=st.none() | PATH_TEXT.map(lambda text: Path("/" + text)),
    ),
    pause=st.builds(PauseConfig, workers=st.integers(1, 64)),
)
CONFIGS = st.builds(lambda config, sections: replace(config, **sections), BARE, tiers())

VALUES = (
    st.sampled_from([None, True, [], [1], {"tokens": 1}, "", "1GiB", "1h", "~", "$X", "/a", "always", b"x"])
    | st.sampled_from(
        ["redis", "both", [{}], [{"prefix": "a"}], [{"prefix": "a", "quota_bytes": "1GiB"}], 0.5]
    )
    | st.integers()
    | st.integers(min_value=10**400, max_value=10**401)
    | st.floats()
    | PATH_TEXT
)
SECTIONS = sorted(to_mapping(Config()))
KEYS = sorted(
    {
        key.name
        for section in (SsdConfig, RedisConfig, PlacementConfig, TenantsConfig, RestoreConfig, LinkConfig)
        for key in fields(section)
    }
    | {"tokens", "workers", "idle_pause_s"}
)
NAMES = st.sampled_from([*SECTIONS, *KEYS])


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
@given(
    st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3) | VALUES, max_size=3)
    | st.dictionaries(st.sampled_from(SECTIONS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2))
)
def test_any_mapping_is_read_or_refused(mapping: dict[str, object]) -> None:
    try:
        config = parse_config(mapping, "test", {"HOME": "/h"})
    except ConfigError:
        return
    assert parse_config(to_mapping(config), "test", {"HOME": "/h"}) == config


@calm
@given(
    st.sampled_from(["url", "password"]),
    st.text(st.sampled_from("${}*&!|>@`%:,#[]'\"\\ -?\t"), max_size=6),
    st.text(st.sampled_from("${}*&!|>@`%:,#[]'\"\\ -?\t"), max_size=6),
    st.sampled_from(["redis:\n  url: a\n  {}: {}\n  lease_s: 0\n", "redis: {{url: a, {}: {}, lease_s: 0}}"]),
)
def test_no_mistake_in_a_file_shows_a_secret(key: str, before: str, after: str, file: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "krul.yaml"
        path.write_text(file.format(key, f"{before}s3cret{after}"), encoding="utf-8")
        try:
            config = load_config(path, {"HOME": "/h"})
        except ConfigError as error:
            shown = "".join(traceback.format_exception(error))
        else:
            shown = repr(config)
    assert "s3cret" not in shown


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
