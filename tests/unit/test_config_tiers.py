"""The sections redis, placement and tenants: defaults, every refusal, and that no secret is ever shown."""

from __future__ import annotations

import traceback
from dataclasses import fields
from pathlib import Path

import pytest

from sgl_krul.config import (
    Config,
    PlacementConfig,
    RedisConfig,
    TenantRuleConfig,
    TenantsConfig,
    load_config,
    parse_config,
    to_mapping,
)
from sgl_krul.errors import ConfigError

HOME = {"HOME": "/home/ada"}
URL = "redis://127.0.0.1:6379/0"
KEY_OUT = "Correct it, or leave the key out for the default."


def parse(mapping: dict[str, object], **environ: str) -> Config:
    return parse_config(mapping, "krul.yaml", HOME | environ)


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    return str(caught.value)


def redis_of(section: dict[str, object], **environ: str) -> RedisConfig:
    redis = parse({"redis": {"url": URL} | section}, **environ).redis
    assert redis is not None
    return redis


# -- redis --


def test_a_redis_section_needs_its_url_only() -> None:
    assert to_mapping(parse({"redis": {"url": URL}}))["redis"] == {
        "url": URL,
        "username": None,
        "password": None,
        "tls_ca_file": None,
        "key_prefix": "krul",
        "capacity_bytes": 64 * 2**30,
        "ttl_s": 7 * 86400.0,
        "timeout_s": 2.0,
        "connect_timeout_s": 1.0,
        "connections": 8,
        "max_in_flight_bytes": 256 * 2**20,
        "lease_s": 30.0,
    }


def test_every_key_of_redis_is_read() -> None:
    given = {
        "url": "rediss+cluster://a:1,b:2",
        "username": "krul",
        "password": "s3cret",
        "tls_ca_file": "~/ca.pem",
        "key_prefix": "team",
        "capacity_bytes": "1TiB",
        "ttl_s": "1d",
        "timeout_s": "500ms",
        "connect_timeout_s": "250ms",
        "connections": 32,
        "max_in_flight_bytes": "1GiB",
        "lease_s": "1m",
    }
    assert list(given) == [key.name for key in fields(RedisConfig)]
    assert redis_of(dict(given)) == RedisConfig(
        url="rediss+cluster://a:1,b:2",
        username="krul",
        password="s3cret",
        tls_ca_file=Path("/home/ada/ca.pem"),
        key_prefix="team",
        capacity_bytes=2**40,
        ttl_s=86400.0,
        timeout_s=0.5,
        connect_timeout_s=0.25,
        connections=32,
        max_in_flight_bytes=2**30,
        lease_s=60.0,
    )


@pytest.mark.parametrize("text", ["", "redis: null\n", "redis:\n", "redis:\n  # url: redis://h\n"])
def test_redis_is_off_where_nothing_is_said_of_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "krul.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path, HOME).redis is None


@pytest.mark.parametrize("key", ["username", "password", "tls_ca_file"])
def test_null_is_the_default_of_what_redis_may_do_without(key: str) -> None:
    assert redis_of({key: None}) == RedisConfig(url=URL)


URL_ADVICE = (
    "expected a URL such as redis://127.0.0.1:6379/0 or redis+cluster://host1:6379,host2:6379; "
    "$VARIABLES are filled in."
)


def test_a_redis_section_without_its_url_is_refused() -> None:
    assert refusal({"redis": {"password": "s3cret"}}) == (
        f"krul.yaml: redis.url: missing: {URL_ADVICE[:-1]}. Add it, or leave the section redis out."
    )


@pytest.mark.parametrize(
    ("key", "value", "why", "expected"),
    [
        ("username", "", "empty", "a user name, or null; $VARIABLES are filled in"),
        ("username", 7, "not a text", "a user name, or null; $VARIABLES are filled in"),
        (
            "username",
            "$NAME",
            "the environment variable NAME is not set",
            "a user name, or null; $VARIABLES are filled in",
        ),
        (
            "tls_ca_file",
            "ca.pem",
            "not absolute",
            "an absolute path; a leading ~ and $VARIABLES are filled in",
        ),
        ("tls_ca_file", False, "not a path", "an absolute path; a leading ~ and $VARIABLES are filled in"),
        ("key_prefix", None, "not a text", "a word before every key; $VARIABLES are filled in"),
        ("key_prefix", "", "empty", "a word before every key; $VARIABLES are filled in"),
        (
            "capacity_bytes",
            0,
            "out of range",
            "a size of at least 1B, such as 512MiB, 8GiB or 10_000",
        ),
        (
            "ttl_s",
            59,
            "out of range",
            "a duration from 1m to 36500d, such as 20ms, 1h30m or a number of seconds",
        ),
        (
            "timeout_s",
            0,
            "out of range",
            "a duration from 10ms to 1m, such as 20ms, 1h30m or a number of seconds",
        ),
        (
            "connect_timeout_s",
            "61s",
            "out of range",
            "a duration from 10ms to 1m, such as 20ms, 1h30m or a number of seconds",
        ),
        ("connections", 0, "out of range", "a whole number from 1 to 256"),
        ("connections", 257, "out of range", "a whole number from 1 to 256"),
        (
            "max_in_flight_bytes",
            "1023KiB",
            "out of range",
            "a size of at least 1MiB, such as 512MiB, 8GiB or 10_000",
        ),
        (
            "lease_s",
            "500ms",
            "out of range",
            "a duration from 1s to 1h, such as 20ms, 1h30m or a number of seconds",
        ),
    ],
)
def test_values_of_redis_that_are_refused(key: str, value: object, why: str, expected: str) -> None:
    assert refusal({"redis": {"url": URL, key: value}}) == (
        f"krul.yaml: redis.{key}: {value!r} cannot be used ({why}): expected {expected}. {KEY_OUT}"
    )


# -- secrets --


def test_variables_in_secrets_are_filled_in() -> None:
    redis = redis_of(
        {"url": "redis://:${PASSWORD}@$HOST/0", "password": "$PASSWORD"}, PASSWORD="a$b$$c", HOST="h:1"
    )
    assert redis.url == "redis://:a$b$$c@h:1/0"
    assert redis.password == "a$b$$c"
    assert redis_of({"password": "a$$b"}).password == "a$b"


NOT_SET = "a $VARIABLE in it is not set; a dollar sign itself is written $$"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "not a text"),
        (7, "not a text"),
        (["s3cret"], "not a text"),
        ("", "empty"),
        ("redis://:s3cret$@h", "Invalid placeholder in string: line 1, col 16"),
        ("redis://:$s3cret@h", NOT_SET),
        ("redis://:${s3cret}@h", NOT_SET),
    ],
)
def test_urls_that_are_refused(value: object, why: str) -> None:
    assert refusal({"redis": {"url": value}}) == (
        f"krul.yaml: redis.url: the value cannot be used ({why}): {URL_ADVICE} "
        "Correct it, or leave the section redis out."
    )


@pytest.mark.parametrize(
    ("value", "why"), [(7, "not a text"), ("", "empty"), ("$s3cret", NOT_SET), ("s3c$ret", NOT_SET)]
)
def test_passwords_that_are_refused(value: object, why: str) -> None:
    assert refusal({"redis": {"url": URL, "password": value}}) == (
        f"krul.yaml: redis.password: the value cannot be used ({why}): expected a password, or null; "
        f"$VARIABLES are filled in. {KEY_OUT}"
    )


@pytest.mark.parametrize("value", ["redis://:s3cret@h", ["s3cret"], False])
def test_a_redis_section_that_is_no_section_is_refused_unseen(value: object) -> None:
    assert refusal({"redis": value}) == (
        "krul.yaml: redis: the value cannot be used: expected a section with keys such as url, or null to do "
        "without redis."
    )


@pytest.mark.parametrize("key", ["password:s3cret", "s3cret", "url s3cret", 7])
def test_an_unknown_key_of_redis_that_may_be_a_secret_is_not_shown(key: object) -> None:
    assert refusal({"redis": {"url": URL, key: None}}).startswith(
        "krul.yaml: redis: key 2 (not shown, it may be part of a password): unknown key."
    )


def test_no_repr_shows_a_secret() -> None:
    config = parse({"redis": {"url": "redis://:s3cret@h", "password": "s3cret"}})
    assert "s3cret" not in repr(config)
    assert "s3cret" not in str(config)
    assert "s3cret" not in f"{config.redis}"


@pytest.mark.parametrize(
    "text",
    [
        "redis: {url: x, password:s3cret}",
        "redis: {url: x, password: a,s3cret}",
        "redis: {password: s3cret",
        "redis: {url: a, password: s3cret, password: s3cret}",
        "redis: {? [s3cret] : 1}",
        "redis: redis://:s3cret@h",
        "- redis: {password: s3cret}",
        "s3cret",
        "redis:\n  password: *s3cret\n",
        "redis:\n  password: !s3cret\n",
        "redis:\n  password: !a!s3cret b\n",
        "redis:\n  password: &s3cret a\n  username: &s3cret b\n",
        "redis:\n  password: @s3cret\n",
        "redis:\n  password: %s3cret\n",
        "redis:\n  password: 's3cret\n",
        'redis:\n  password: "s3cret\\c"\n',
        "redis:\n  password: s3cret: b\n",
        "redis:\n  url: a\n   password: s3cret\n",
        "redis:\n  url: a\n  password:s3cret\n  username: b\n",
        "redis:\n  password: [s3cret]\n  url: a\n",
        "redis:\n  password: a$s3cret\n  url: a\n",
        "redis:\n  password: s3cret\n  url: a\n  lease_s: 0\n",
    ],
)
def test_no_mistake_in_a_file_shows_a_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "krul.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, HOME)
    assert str(caught.value).count("\n") == 0
    # Our own lines of code do not hold it, so the traceback may not either.
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


# -- placement --


def test_every_key_of_placement_is_read() -> None:
    given: dict[str, object] = {
        "replicate": "both",
        "memory_max_bytes": "64MiB",
        "memory_age_s": "1m",
        "demote_after_s": "1h",
        "high_watermark": 1,
        "low_watermark": 0.5,
        "interval_s": "5s",
    }
    assert list(given) == [key.name for key in fields(PlacementConfig)]
    assert parse({"redis": {"url": URL}, "placement": given}).placement == PlacementConfig(
        replicate="both",
        memory_max_bytes=64 * 2**20,
        memory_age_s=60.0,
        demote_after_s=3600.0,
        high_watermark=1.0,
        low_watermark=0.5,
        interval_s=5.0,
    )


FROM_NULL = "a duration from 0s to 36500d, such as 20ms, 1h30m or a number of seconds"


@pytest.mark.parametrize(
    ("key", "value", "why", "expected"),
    [
        ("replicate", "none", "not one of them", "one of ssd, redis, both"),
        ("replicate", None, "not one of them", "one of ssd, redis, both"),
        ("replicate", ["ssd"], "not one of them", "one of ssd, redis, both"),
        (
            "memory_max_bytes",
            -1,
            "out of range",
            "a size of at least 0B, such as 512MiB, 8GiB or 10_000",
        ),
        ("memory_age_s", -1, "out of range", FROM_NULL),
        ("demote_after_s", -0.5, "out of range", FROM_NULL),
        ("interval_s", 0, "out of range", FROM_NULL.replace("0s", "100ms")),
        *(
            (key, value, why, "a number above 0, at most 1")
            for key in ("high_watermark", "low_watermark")
            for value, why in (
                (0, "out of range"),
                (-0.1, "out of range"),
                (1.01, "out of range"),
                (90, "out of range"),
                (float("nan"), "out of range"),
                (float("inf"), "out of range"),
                (True, "not such a number"),
                ("0.9", "not such a number"),
                ("90%", "not such a number"),
                (None, "not such a number"),
            )
        ),
    ],
)
def test_values_of_placement_that_are_refused(key: str, value: object, why: str, expected: str) -> None:
    assert refusal({"placement": {key: value}}) == (
        f"krul.yaml: placement.{key}: {value!r} cannot be used ({why}): expected {expected}. {KEY_OUT}"
    )


def test_a_number_too_long_for_a_float_is_refused() -> None:
    assert "cannot be used (out of range)" in refusal({"placement": {"high_watermark": 10**400}})
    assert "cannot be used (out of range)" in refusal({"placement": {"memory_age_s": 10**400}})
    assert "cannot be used (out of range)" in refusal({"placement": {"memory_max_bytes": 10**400}})


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({"high_watermark": 0.5}, "0.8", "0.5"),
        ({"low_watermark": 0.95}, "0.95", "0.9"),
        ({"low_watermark": 0.4, "high_watermark": 0.3}, "0.4", "0.3"),
    ],
)
def test_a_low_watermark_above_the_high_one_is_refused(given: object, low: str, high: str) -> None:
    assert refusal({"placement": given}) == (
        f"krul.yaml: placement.low_watermark: {low} cannot be used: expected at most "
        f"placement.high_watermark, which is {high}. Correct one, or leave both out for the defaults."
    )


def test_watermarks_may_be_equal() -> None:
    placement = parse({"placement": {"low_watermark": 0.5, "high_watermark": 0.5}}).placement
    assert placement.low_watermark == placement.high_watermark == 0.5


NO_SSD: dict[str, object] = {"ssd": None}
REDIS: dict[str, object] = {"redis": {"url": URL}}


@pytest.mark.parametrize(
    ("tiers", "replicate"),
    [({}, "ssd"), (NO_SSD, "ssd"), (REDIS, "ssd"), (NO_SSD | REDIS, "redis")],
)
@pytest.mark.parametrize("placement", [{}, {"placement": None}, {"placement": {"interval_s": 1}}])
def test_replicate_left_out_is_a_tier_that_is_there(
    tiers: dict[str, object], replicate: str, placement: dict[str, object]
) -> None:
    config = parse(tiers | placement)
    assert config.placement.replicate == replicate
    assert parse_config(to_mapping(config), "test", HOME) == config


@pytest.mark.parametrize(
    ("tiers", "replicate", "lacking"),
    [
        ({}, "redis", "redis"),
        ({}, "both", "redis"),
        (NO_SSD, "redis", "redis"),
        (NO_SSD, "both", "ssd"),
        (NO_SSD | REDIS, "ssd", "ssd"),
        (NO_SSD | REDIS, "both", "ssd"),
    ],
)
def test_replicate_to_a_tier_that_is_not_there_is_refused(
    tiers: dict[str, object], replicate: str, lacking: str
) -> None:
    assert refusal(tiers | {"placement": {"replicate": replicate}}) == (
        f"krul.yaml: placement.replicate: {replicate!r} cannot be used without the section {lacking}: "
        "add it, or choose another of ssd, redis, both."
    )


# -- tenants --


def test_every_key_of_tenants_is_read() -> None:
    given: dict[str, object] = {
        "separator": "",
        "quota_bytes": "1GiB",
        "rules": [
            {"prefix": "team-a-", "tenant": "a", "quota_bytes": "50GiB"},
            {"prefix": "alpha-", "tenant": "a"},
            {"prefix": "$b$"},
        ],
    }
    assert list(given) == [key.name for key in fields(TenantsConfig)]
    assert parse({"tenants": given}).tenants == TenantsConfig(
        separator="",
        quota_bytes=2**30,
        rules=(
            TenantRuleConfig("team-a-", "a", 50 * 2**30),
            TenantRuleConfig("alpha-", "a", 0),
            TenantRuleConfig("$b$", "$b$", 0),
        ),
    )


def test_values_of_tenants_that_are_refused() -> None:
    assert refusal({"tenants": {"separator": None}}) == (
        "krul.yaml: tenants.separator: None cannot be used (not a text): expected a text, or '' for no "
        f"tenants; $VARIABLES are filled in. {KEY_OUT}"
    )
    assert refusal({"tenants": {"quota_bytes": -1}}) == (
        "krul.yaml: tenants.quota_bytes: -1 cannot be used (out of range): expected a size of at least 0B, "
        f"such as 512MiB, 8GiB or 10_000. {KEY_OUT}"
    )


RULES = "a list of rules such as {prefix: team-a-, tenant: team-a, quota_bytes: 50GiB}"


@pytest.mark.parametrize("value", [None, "team-a", {"prefix": "a"}])
def test_rules_that_are_no_list_are_refused(value: object) -> None:
    assert refusal({"tenants": {"rules": value}}) == (
        f"krul.yaml: tenants.rules: {value!r} cannot be used (not a list): expected {RULES}. {KEY_OUT}"
    )


GOOD = {"prefix": "a", "tenant": "t", "quota_bytes": 5}


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("team-b", "not a mapping"),
        (None, "not a mapping"),
        ({"prefix": "b", "quota": 1}, "unknown key 'quota'"),
        ({1: 1}, "unknown key 1"),
        ({}, "prefix: missing"),
        ({"tenant": "b"}, "prefix: missing"),
        ({"prefix": ""}, "prefix: missing"),
        ({"prefix": 7}, "prefix: not a text"),
        ({"prefix": "b", "tenant": None}, "tenant: missing"),
        ({"prefix": "b", "tenant": ""}, "tenant: missing"),
        ({"prefix": "b", "tenant": ["b"]}, "tenant: not a text"),
        ({"prefix": "b", "quota_bytes": -1}, "quota_bytes: out of range"),
        ({"prefix": "b", "quota_bytes": 2**63}, "quota_bytes: out of range"),
        ({"prefix": "b", "quota_bytes": "5 gib"}, "quota_bytes: not a size"),
        ({"prefix": "b", "quota_bytes": None}, "quota_bytes: not a size"),
        ({"prefix": "b", "quota_bytes": 1.5}, "quota_bytes: part of a byte"),
        ({"prefix": "a"}, "prefix: 'a' is that of rule 1 too"),
        ({"prefix": "b", "tenant": "t", "quota_bytes": 6}, "quota_bytes: tenant 't' has another in rule 1"),
    ],
)
def test_a_rule_that_is_refused_is_told_by_its_number(rule: object, why: str) -> None:
    message = refusal({"tenants": {"rules": [GOOD, rule]}})
    assert message.startswith("krul.yaml: tenants.rules: [{")
    assert message.endswith(
        f" cannot be used (rule 2: {why}; known keys: prefix, tenant, quota_bytes): "
        f"expected {RULES}. {KEY_OUT}"
    )


def test_two_rules_of_one_tenant_may_say_the_same_quota_or_none() -> None:
    rules = [GOOD, {"prefix": "b", "tenant": "t"}, {"prefix": "c", "tenant": "t", "quota_bytes": 5}]
    assert len(parse({"tenants": {"rules": rules}}).tenants.rules) == 3
