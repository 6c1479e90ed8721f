"""One rank's part of a configuration, and what ranks do not serve yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sgl_krul.config import (
    Config,
    EstimatorConfig,
    MemoryConfig,
    PlacementConfig,
    RedisConfig,
    SessionConfig,
    SsdConfig,
    TenantRuleConfig,
    TenantsConfig,
)
from sgl_krul.errors import ConfigError
from sgl_krul.service.share import check_share, share_of
from tests.sessions import open_ssd

CONFIG = Config(
    memory=MemoryConfig(100, prefault_bytes=0),
    ssd=SsdConfig(Path("/store"), capacity_bytes=1001, free_space_floor_bytes=7, daily_write_bytes=10),
    tenants=TenantsConfig(quota_bytes=50, rules=(TenantRuleConfig("a", "a", 9), TenantRuleConfig("b", "b"))),
)


def test_a_rank_has_its_part_of_every_budget_and_its_own_directory() -> None:
    share = share_of(CONFIG, 1, 4)
    assert share.memory == MemoryConfig(25, prefault_bytes=0)
    assert share.ssd == SsdConfig(
        Path("/store/rank1"), capacity_bytes=251, free_space_floor_bytes=7, daily_write_bytes=3
    )
    assert share.tenants.quota_bytes == 13
    assert [rule.quota_bytes for rule in share.tenants.rules] == [3, 0]


def test_one_rank_has_all() -> None:
    assert share_of(CONFIG, 0, 1) is CONFIG


def test_without_a_store_there_is_none_to_share() -> None:
    assert share_of(replace(CONFIG, ssd=None), 0, 2).ssd is None


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("redis", Config(redis=RedisConfig("redis://localhost"))),
        ("session.ttl_s", Config(session=SessionConfig(ttl_s=60))),
        ("placement.memory_max_bytes", Config(placement=PlacementConfig(memory_max_bytes=1))),
        ("estimator.enabled", Config(estimator=EstimatorConfig(enabled=True))),
    ],
)
def test_what_is_not_served_is_named(key: str, config: Config) -> None:
    check_share(config, 1)
    with pytest.raises(ConfigError, match=rf"^{key}: not served with --tp-size 2 yet"):
        check_share(config, 2)


def test_everything_else_is_served() -> None:
    check_share(CONFIG, 8)


def test_a_store_leaves_those_of_ranks_below_it_alone(tmp_path: Path) -> None:
    with open_ssd(tmp_path / "rank1") as tier:
        tier.put("v1/n/d/manifest", b"header", [b"body"])
        temporary = tmp_path / "rank1" / "v1" / ".tmp-1"
        temporary.touch()  # a write of that rank is under way
        with open_ssd(tmp_path) as above:
            assert list(above.scan("")) == []
            assert temporary.exists()
        temporary.unlink()
