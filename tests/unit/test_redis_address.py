"""Redis URLs: what they mean, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_krul.errors import ConfigError
from sgl_krul.store.redis.address import Endpoint, RedisUrl, parse_redis_url
from tests.redis_servers import open_tier

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://db.example", RedisUrl("single", (Endpoint("db.example", 6379),))),
        ("redis://db.example:7000/3", RedisUrl("single", (Endpoint("db.example", 7000),), database=3)),
        ("redis://127.0.0.1/", RedisUrl("single", (Endpoint("127.0.0.1", 6379),))),
        ("redis://[::1]:7000", RedisUrl("single", (Endpoint("::1", 7000),))),
        ("rediss://db", RedisUrl("single", (Endpoint("db", 6379),), tls=True)),
        ("redis://:pw@db", RedisUrl("single", (Endpoint("db", 6379),), password="pw")),
        (
            "redis://me:p%40%2Fw%3A@db",
            RedisUrl("single", (Endpoint("db", 6379),), username="me", password="p@/w:"),
        ),
        ("redis://me:@db", RedisUrl("single", (Endpoint("db", 6379),), username="me", password="")),
        ("unix:///run/redis.sock", RedisUrl("single", (Endpoint(path="/run/redis.sock"),))),
        ("unix:///run/r%40dis?db=2", RedisUrl("single", (Endpoint(path="/run/r@dis"),), database=2)),
        ("unix://:pw@/run/r", RedisUrl("single", (Endpoint(path="/run/r"),), password="pw")),
        (
            "redis+cluster://a:1,b",
            RedisUrl("cluster", (Endpoint("a", 1), Endpoint("b", 6379))),
        ),
        (
            "rediss+cluster://me:pw@a:1/0",
            RedisUrl("cluster", (Endpoint("a", 1),), tls=True, username="me", password="pw"),
        ),
        (
            "redis+sentinel://a,b:7/my.master/4",
            RedisUrl("sentinel", (Endpoint("a", 26379), Endpoint("b", 7)), database=4, service="my.master"),
        ),
        ("rediss+sentinel://a/m", RedisUrl("sentinel", (Endpoint("a", 26379),), tls=True, service="m")),
    ],
)
def test_urls(url: str, expected: RedisUrl) -> None:
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "no '://' in it"),
        ("localhost:6379", "no '://' in it"),
        ("http://db", "'http' is not known; expected redis://"),
        ("://db", "its scheme is not known"),
        ("redis+clusters://db", "is not known"),
        ("rediss+unix:///x", "is not known"),
        ("redis://", "redis://: host number 1: expected host or host:port"),
        ("redis://:6379", "host number 1: expected"),
        ("redis://db:", "host number 1: expected"),
        ("redis://db:port", "host number 1: expected .*user and password go before it, as in user:password@"),
        ("redis://d b", "host number 1: expected"),
        ("redis://::1", "IPv6 in brackets"),
        ("redis://db:0", "ports from 1 to 65535"),
        ("redis://db:65536", "ports from 1 to 65535"),
        ("redis://db/one", "redis://db:6379: the database: expected a number from 0 to 1000000"),
        ("redis://db/-1", "the database: expected"),
        ("redis://db/1/2", "the database: expected"),
        ("redis://db/12345678", "the database: expected"),
        ("redis://db?ssl=true", "options after '[?]' are not read"),
        ("redis://db#0", "options after '[?]' are not read"),
        ("redis://a,b", "2 hosts: use redis[+]cluster:// or redis[+]sentinel://"),
        ("redis+cluster://a/1", "a:6379: another database than 0 after the '/': a cluster has that only"),
        ("redis+cluster://a,", "host number 2: expected host"),
        ("redis+cluster://u:p@h,u:p@g", "once, before the first host; in them write %40, %2C"),
        ("redis+cluster://h,u:p@g", "once, before the first host"),
        ("redis+cluster://h:6379,u:p@g", "once, before the first host"),
        ("redis+sentinel://u:p@h,u:p@g/main", "once, before the first host"),
        ("redis://u:p@h,u:p@g", "once, before the first host"),
        ("redis+sentinel://a", "no service: expected the name the sentinels give the master"),
        ("redis+sentinel://a//0", "no service"),
        ("redis+sentinel://a/my master", "no service"),
        ("redis+sentinel://a/m/x", "the database: expected"),
        ("unix://run/redis.sock", "expected the absolute path"),
        ("unix:///", "expected the absolute path"),
        ("unix:///run/r#1", "write %23"),
        ("unix:///run/r?password=x", "expected nothing or db=N"),
        ("unix:///run/r?db=x", "unix:///run/r: the database: expected"),
        ("redis://me@db", "a user without a password"),
    ],
)
def test_mistakes(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_redis_url(url)


def test_user_and_password_may_come_beside_the_url() -> None:
    assert parse_redis_url("redis://db", username="me", password="pw").username == "me"
    assert parse_redis_url("redis://db", password="pw").password == "pw"
    assert parse_redis_url("redis://:pw@db", username="me").username == "me"
    assert parse_redis_url("redis://me:pw@db", username="me", password="pw").password == "pw"
    with pytest.raises(ConfigError, match=r"another password than redis.password says"):
        parse_redis_url("redis://:pw@db", password="other")
    with pytest.raises(ConfigError, match=r"another user than redis.username says"):
        parse_redis_url("redis://me:pw@db", username="you")
    with pytest.raises(ConfigError, match=r"user 'me' without a password; set redis.password"):
        parse_redis_url("redis://db", username="me")


@pytest.mark.parametrize(
    "url",
    [
        f"redis://me:{SECRET}@d b",
        f"redis://me:{SECRET}@db:0",
        f"redis://me:{SECRET}@db?x",
        f"redis://me:{SECRET}/@db/x",
        f"redis://me:{SECRET}@@db/x",
        f"redis://me:{SECRET}?#@a,b",
        f"http://me:{SECRET}@db",
        f"unix://me:{SECRET}@run",
        f"redis+cluster://:{SECRET}@a/9",
        f"redis+sentinel://:{SECRET}@a",
        f"{SECRET}",
        f"me:{SECRET}@db",
        f"redis://h/0?password={SECRET}",
        f"redis://h/0?password=a@{SECRET}",
        f"redis://h:6379/0?password=a@{SECRET}",
        f"redis://h/0#{SECRET}",
        f"redis://h#a@{SECRET}",
        f"redis://h/{SECRET}",
        f"redis://me:{SECRET}",
        f"redis://:{SECRET}",
        f"redis://me:{SECRET}/0",
        f"redis://me:7/{SECRET}",
        f"redis://{SECRET}@h",
        f"redis+cluster://me:a@h,me:{SECRET}@g",
        f"redis+cluster://h/{SECRET}",
        f"redis+cluster://h,me:{SECRET}",
        f"redis+sentinel://h/my {SECRET}",
        f"redis+sentinel://h/main/{SECRET}",
        f"unix:///run/r?password={SECRET}",
        f"unix:///run/r?db=0&password={SECRET}",
        f"unix:///run/r#{SECRET}",
        f"unix://me:{SECRET}/run/r",
        f"me:{SECRET}@h://x",
        f"{SECRET}://x",
    ],
)
def test_no_message_has_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert SECRET not in str(caught.value)


def test_neither_has_repr_or_str() -> None:
    url = parse_redis_url(f"redis://me:{SECRET}@db")
    assert url.password == SECRET
    assert SECRET not in repr(url) + str(url)
    tier = open_tier(f"redis://me:{SECRET}@db")
    assert SECRET not in repr(tier) + str(tier)
    assert str(tier) == "<RedisTier redis db:6379>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_prefix": ""}, "redis.key_prefix ''"),
        ({"key_prefix": "a{b}"}, "redis.key_prefix 'a{b}'"),
        ({"key_prefix": "k" * 65}, "redis.key_prefix"),
        ({"capacity_bytes": 0}, "redis.capacity_bytes 0: expected at least 1"),
        ({"connections": 0}, "redis.connections 0: expected at least 1"),
        ({"max_in_flight_bytes": 1000}, "redis.max_in_flight_bytes 1000: expected at least 1048576"),
        ({"ttl_s": 0.5}, "redis.ttl_s 0.5: expected 1 to"),
        ({"ttl_s": float("inf")}, "redis.ttl_s inf"),
        ({"timeout_s": 0.0}, "redis.timeout_s 0.0"),
        ({"connect_timeout_s": -1.0}, "redis.connect_timeout_s -1.0"),
        ({"lease_s": float("nan")}, "redis.lease_s nan"),
        ({"owner": ""}, "owner '': expected"),
        ({"owner": "a\nb"}, r"owner 'a\\nb'"),
        ({"tls_ca_file": Path("/ca.pem")}, "redis.tls_ca_file /ca.pem: the URL is not one of TLS"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tier("redis://db", **changes)


def test_a_bad_ca_file_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*expected certificates in PEM"):
        open_tier("rediss://db", tls_ca_file=tmp_path / "none.pem")
    (tmp_path / "bad.pem").write_text("not PEM")
    with pytest.raises(ConfigError, match="expected certificates in PEM"):
        open_tier("rediss://db", tls_ca_file=tmp_path / "bad.pem")
