"""The part of `krul doctor` that looks at the places where sessions are to lie: memory, disk and Redis."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import NamedTuple

from sgl_krul.config import Config, MemoryConfig, RedisConfig, SsdConfig, format_size
from sgl_krul.errors import ConfigError, StoreError
from sgl_krul.store.redis import RedisTier

__all__ = ["Finding", "Level", "check_tiers", "usage_finding"]

_NEARLY_FULL = 0.9


class Level(StrEnum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """One line; `advice` is empty where all is well."""

    level: Level
    name: str
    text: str
    advice: str = ""


def check_tiers(config: Config) -> Iterator[Finding]:
    """Look at every place the configuration names; writes nothing that stays."""
    yield _memory(config.memory)
    if config.ssd is not None:
        yield _disk(config.ssd)
    elif config.redis is None:
        yield Finding(
            Level.WARN,
            "store",
            "no disk: sessions end with the server",
            "set ssd.path to keep them over a restart",
        )
    if config.redis is not None:
        yield _redis(config.redis)


def usage_finding(name: str, text: str, used_bytes: int, capacity_bytes: int) -> Finding:
    """A line that ends in how full a tier is, and warns when that is nearly all."""
    text += f"{format_size(used_bytes)} of {format_size(capacity_bytes)} used"
    if used_bytes > _NEARLY_FULL * capacity_bytes:
        return Finding(Level.WARN, name, text, "delete sessions (`krul sessions rm`), or raise the cap")
    return Finding(Level.OK, name, text)


def _memory(settings: MemoryConfig) -> Finding:
    capacity, ram = settings.capacity_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{format_size(capacity)} of {format_size(ram)} RAM for sessions"
    if capacity >= ram:
        return Finding(Level.FAIL, "memory", text, "make memory.capacity_bytes smaller than the RAM")
    if capacity > ram // 2:
        return Finding(Level.WARN, "memory", text, "the model needs some too: at most half is safe")
    return Finding(Level.OK, "memory", text)


def _disk(settings: SsdConfig) -> Finding:
    path, floor = settings.path, settings.free_space_floor_bytes
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            raise NotADirectoryError(20, "Not a directory", str(place))
        # A real file: permissions alone don't tell of a read-only mount, a quota or a root's rights.
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"krul")
        free = shutil.disk_usage(place).free
    except OSError as error:
        advice = "give ssd.path a folder that the server's user may write"
        return Finding(Level.FAIL, "store", f"{path}: {place}: {error.strerror}", advice)
    text = f"{path}{'' if place == path else ' (made at the start)'}, {format_size(free)} free"
    if free <= floor:
        advice = f"free some space, or lower ssd.free_space_floor_bytes ({format_size(floor)})"
        return Finding(Level.FAIL, "store", f"{text}: nothing would be stored", advice)
    if free - floor < settings.capacity_bytes:
        return Finding(
            Level.WARN,
            "store",
            f"{text}, less than ssd.capacity_bytes ({format_size(settings.capacity_bytes)}) and the floor "
            f"({format_size(floor)})",
            "fine for now: a pause is refused when it is full",
        )
    return Finding(Level.OK, "store", text)


def _redis(settings: RedisConfig) -> Finding:
    """What went wrong is said by the tier, which never shows a password."""
    owner = f"krul-doctor:{os.getpid()}"
    try:
        tier = RedisTier.open(**asdict(settings), owner=owner)
    except ConfigError as error:
        return Finding(Level.FAIL, "redis", str(error), "correct the section redis of the configuration")
    with tier:
        try:
            tier.refresh()
            # Reading alone doesn't tell of a replica or a user who may not write.
            with tier.lease(f"doctor/{secrets.token_hex(8)}/"):
                usage = tier.usage()
        except StoreError as error:
            advice = "start it, or correct redis.url, redis.username, redis.password and redis.tls_ca_file"
            return Finding(Level.FAIL, "redis", str(error), advice)
        return usage_finding("redis", f"{tier.place} answers, ", usage.bytes, usage.capacity_bytes)
