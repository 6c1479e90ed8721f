"""The sections restore and link: every key, every refusal, and a link before an opened tier."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import pytest

from sgl_krul.config import Config, LinkConfig, RestoreConfig, load_config, parse_config
from sgl_krul.errors import ConfigError
from sgl_krul.service.places import open_store
from sgl_krul.store.link import LinkTier

HOME = {"HOME": "/home/ada"}
SIZE_FROM_0 = "a size of at least 0B, such as 512MiB, 8GiB or 10_000"


def parse(mapping: dict[str, object]) -> Config:
    return parse_config(mapping, "krul.yaml", HOME)


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    return str(caught.value)


def test_every_key_of_restore_is_read() -> None:
    given = {
        "workers": 3,
        "max_layer_wait_s": "5ms",
        "strategy": "half",
        "recompute": False,
        "max_slice_tokens": 256,
        "max_step_s": "20ms",
        "staging_bytes": "8MiB",
        "rates_file": "~/rates.json",
    }
    assert list(given) == [key.name for key in fields(RestoreConfig)]
    assert parse({"restore": given}).restore == RestoreConfig(
        workers=3,
        max_layer_wait_s=0.005,
        strategy="half",
        recompute=False,
        max_slice_tokens=256,
        max_step_s=0.02,
        staging_bytes=8 << 20,
        rates_file=Path("/home/ada/rates.json"),
    )


@pytest.mark.parametrize("strategy", ["optimal", "load", "recompute", "half", "paper"])
def test_every_strategy_has_its_name(strategy: str) -> None:
    assert parse({"restore": {"strategy": strategy}}).restore.strategy == strategy


@pytest.mark.parametrize(
    ("key", "value", "why", "expected"),
    [
        ("strategy", "fast", "not one of them", "one of optimal, load, recompute, half, paper"),
        ("strategy", None, "not one of them", "one of optimal, load, recompute, half, paper"),
        ("recompute", "yes", "not one of them", "true or false"),
        ("recompute", 1, "not one of them", "true or false"),
        ("recompute", None, "not one of them", "true or false"),
        ("max_slice_tokens", 0, "out of range", "a multiple of 16 from 16 to 1048576"),
        ("max_slice_tokens", 100, "not such a number", "a multiple of 16 from 16 to 1048576"),
        (
            "max_step_s",
            0,
            "out of range",
            "a duration from 1ms to 10s, such as 20ms, 1h30m or a number of seconds",
        ),
        (
            "staging_bytes",
            1000,
            "out of range",
            "a size of at least 1MiB, such as 512MiB, 8GiB or 10_000",
        ),
        (
            "rates_file",
            "rates.json",
            "not absolute",
            "an absolute path; a leading ~ and $VARIABLES are filled in",
        ),
    ],
)
def test_values_of_restore_that_are_refused(key: str, value: object, why: str, expected: str) -> None:
    assert refusal({"restore": {key: value}}) == (
        f"krul.yaml: restore.{key}: {value!r} cannot be used ({why}): expected {expected}. "
        "Correct it, or leave the key out for the default."
    )


# -- link --


def test_every_key_of_link_is_read() -> None:
    given = {
        "bytes_per_s": "18MB",
        "tier": "ssd",
        "latency_s": "5ms",
        "jitter": 0.1,
        "seed": 7,
        "change_after_bytes": "10MB",
        "change_to_bytes_per_s": "2MB",
        "dead_after_s": "500ms",
    }
    assert list(given) == [key.name for key in fields(LinkConfig)]
    assert parse({"link": given}).link == LinkConfig(
        bytes_per_s=18_000_000,
        latency_s=0.005,
        jitter=0.1,
        seed=7,
        change_after_bytes=10_000_000,
        change_to_bytes_per_s=2_000_000,
        dead_after_s=0.5,
    )


@pytest.mark.parametrize("text", ["", "link: null\n", "link:\n", "link:\n  #bytes_per_s: 18MB\n"])
def test_no_link_is_emulated_where_nothing_is_said_of_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "krul.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path, HOME).link is None


def test_a_link_without_its_speed_is_refused() -> None:
    assert refusal({"link": {"latency_s": "5ms"}}) == (
        "krul.yaml: link.bytes_per_s: missing: expected a size of at least 1B, such as 512MiB, 8GiB or "
        "10_000. Add it, or leave the section link out."
    )


def test_an_unknown_key_of_a_link_is_refused() -> None:
    assert refusal({"link": {"bytes_per_s": 1, "latency": 1}}).startswith(
        "krul.yaml: link.latency: unknown key. Did you mean link.latency_s? Known here: bytes_per_s, tier, "
    )


@pytest.mark.parametrize(
    ("key", "value", "why", "expected"),
    [
        ("tier", "redis", "not one of them", "one of ssd"),
        ("jitter", 1.5, "out of range", "a number from 0 to 1"),
        ("jitter", -0.1, "out of range", "a number from 0 to 1"),
        ("jitter", True, "not such a number", "a number from 0 to 1"),
        ("seed", 0, "out of range", "a whole number from 1 to 9223372036854775807"),
        ("change_after_bytes", -1, "out of range", SIZE_FROM_0),
        ("change_to_bytes_per_s", "slow", "not a size", SIZE_FROM_0),
        (
            "dead_after_s",
            -1,
            "out of range",
            "a duration from 0s to 1h, such as 20ms, 1h30m or a number of seconds",
        ),
    ],
)
def test_values_of_a_link_that_are_refused(key: str, value: object, why: str, expected: str) -> None:
    assert refusal({"link": {"bytes_per_s": "1MB", key: value}}) == (
        f"krul.yaml: link.{key}: {value!r} cannot be used ({why}): expected {expected}. "
        "Correct it, or leave the key out for the default."
    )


def test_a_link_before_a_tier_that_is_not_there_is_refused() -> None:
    assert refusal({"ssd": None, "link": {"bytes_per_s": 1}}) == (
        "krul.yaml: link.tier: 'ssd' cannot be used without the section of that name: add it, or leave the "
        "section link out."
    )


# -- opened --


def opened(tmp_path: Path, **sections: object) -> object:
    ssd = {"path": str(tmp_path / "store"), "free_space_floor_bytes": 0}
    (tier,) = open_store(parse({"ssd": ssd} | sections)).tiers
    return tier


def test_a_link_stands_before_the_disk_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(tmp_path, link={"bytes_per_s": "18MB", "latency_s": "5ms"})
    assert isinstance(tier, LinkTier)
    assert tier.name == "ssd"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "17.2MiB/s and 5ms latency" in record.getMessage()


def test_without_a_link_nothing_stands_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not isinstance(opened(tmp_path), LinkTier)
    assert caplog.records == []
