"""Where paused sessions lie: pure decisions over numbers that come in. No I/O, no clock.

A place is a tier, a parcel is a session in it. Places are given fastest first, and named as tiers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sgl_krul.errors import ConfigError, QuotaExceeded

__all__ = [
    "MEMORY",
    "Demotion",
    "Parcel",
    "Place",
    "Policy",
    "TenantRule",
    "TenantRules",
    "check_quota",
    "select_demotions",
    "select_expired",
    "select_places",
]

MEMORY = "memory"  # where sessions are before a pause, and gone when the server is


@dataclass(frozen=True)
class Place:
    """A tier as it is now. `write_left_bytes`: what may still be written today; None: no such bound."""

    name: str
    capacity_bytes: int
    used_bytes: int
    available: bool
    write_left_bytes: int | None

    @property
    def room_bytes(self) -> int:
        """The most it can take now: 0 when it is out of reach, full or overfull."""
        if not self.available:
            return 0
        room = self.capacity_bytes - self.used_bytes
        return max(0, room if self.write_left_bytes is None else min(room, self.write_left_bytes))


@dataclass(frozen=True)
class Parcel:
    """A stored session: its bytes, when it was last used (unix seconds), the places that hold all of it."""

    key: str
    tenant: str
    bytes: int
    last_used: float
    places: tuple[str, ...]


@dataclass(frozen=True)
class Policy:
    """`demote_after_s` and `ttl_s` 0: never by age. Watermarks are parts of a place's capacity.

    Raises:
        ConfigError: unless 0 <= low_watermark <= high_watermark <= 1, and no time is negative.
    """

    replicate: Literal["ssd", "redis", "both"]
    demote_after_s: float
    high_watermark: float
    low_watermark: float
    ttl_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                f"low_watermark {self.low_watermark:g}, high_watermark {self.high_watermark:g}: "
                "expected 0 <= low_watermark <= high_watermark <= 1"
            )
        if self.demote_after_s < 0 or self.ttl_s < 0:
            raise ConfigError(
                f"demote_after_s {self.demote_after_s:g}, ttl_s {self.ttl_s:g}: "
                "expected 0 (never) or more of both"
            )

    @property
    def wanted(self) -> frozenset[str]:
        """Names of the places that a pause should write."""
        return frozenset(("ssd", "redis") if self.replicate == "both" else (self.replicate,))


class Demotion(NamedTuple):
    """Take a parcel from `source`. `copy`: `target` has not got it yet, so it is written there first."""

    key: str
    source: str
    target: str
    copy: bool


# -- at a pause --


def select_places(size_bytes: int, places: Sequence[Place], policy: Policy) -> tuple[str, ...]:
    """Where a pause of `size_bytes` writes, fastest first.

    The wanted places that have room; if none has, the fastest other one with room; () when there is none.
    Never memory, which a pause is there to outlive.
    """
    able = [place.name for place in places if place.name != MEMORY and _takes(place, size_bytes)]
    wanted = tuple(name for name in able if name in policy.wanted)
    return wanted or tuple(able[:1])


def _takes(place: Place, size_bytes: int) -> bool:
    return place.available and size_bytes <= place.room_bytes


# -- in the background --


def select_demotions(
    parcels: Iterable[Parcel], places: Sequence[Place], policy: Policy, now: float
) -> list[Demotion]:
    """What to move to slower places, least recently used first.

    A parcel leaves a place when it was idle for longer than `demote_after_s`, or when the place is above
    its high watermark: then until it is at the low one. It goes to the nearest slower place that has it
    already, else it is copied to the nearest with room. Never from the slowest place, nor from or to one that
    is out of reach: a parcel keeps a copy that can be read. Room that these moves will make is not counted,
    so they fit in any order, and when some of them fail.
    """
    plan = _DemotionPlan(places, policy)
    demotions = []
    for parcel in _oldest_first(parcels):
        old = 0 < policy.demote_after_s < now - parcel.last_used
        for index, source in enumerate(places[:-1]):
            if source.available and source.name in parcel.places and (old or plan.too_full(source)):
                demotion = plan.demote(parcel, source, places[index + 1 :])
                if demotion is not None:
                    demotions.append(demotion)
    return demotions


def _oldest_first(parcels: Iterable[Parcel]) -> list[Parcel]:
    return sorted(parcels, key=lambda parcel: (parcel.last_used, parcel.key))


class _DemotionPlan:
    """What is left of each place while a list of demotions is made."""

    def __init__(self, places: Sequence[Place], policy: Policy) -> None:
        self._room = {place.name: place.room_bytes for place in places}
        self._excess = {
            place.name: place.used_bytes - policy.low_watermark * place.capacity_bytes
            for place in places
            if place.used_bytes > policy.high_watermark * place.capacity_bytes
        }

    def too_full(self, place: Place) -> bool:
        """Whether the place was above its high watermark and will still be above the low one."""
        return self._excess.get(place.name, 0) > 0

    def demote(self, parcel: Parcel, source: Place, slower: Sequence[Place]) -> Demotion | None:
        """Enter the move of a parcel from `source` to one of `slower`; None when none can take it."""
        holder = next((place for place in slower if place.available and place.name in parcel.places), None)
        target = holder or next((place for place in slower if self._fits(parcel, place)), None)
        if target is None:
            return None
        if holder is None:
            self._room[target.name] -= parcel.bytes
        if source.name in self._excess:
            self._excess[source.name] -= parcel.bytes
        return Demotion(parcel.key, source.name, target.name, copy=holder is None)

    def _fits(self, parcel: Parcel, place: Place) -> bool:
        return place.available and place.name not in parcel.places and parcel.bytes <= self._room[place.name]


def select_expired(parcels: Iterable[Parcel], policy: Policy, now: float) -> list[str]:
    """Keys of the parcels nobody used for longer than `ttl_s`, least recently used first."""
    if not policy.ttl_s:
        return []
    return [parcel.key for parcel in _oldest_first(parcels) if parcel.last_used + policy.ttl_s < now]


# -- tenants --


def check_quota(tenant: str, used_bytes: int, replaced_bytes: int, size_bytes: int, quota_bytes: int) -> None:
    """Let a tenant that uses `used_bytes` put `size_bytes` in place of `replaced_bytes`. Quota 0: no bound.

    Raises:
        QuotaExceeded: it would use more than its quota then.
    """
    if quota_bytes and used_bytes - replaced_bytes + size_bytes > quota_bytes:
        who = f"tenant {tenant!r} uses" if tenant else "sessions without a tenant use"
        replaced = f" (in place of {replaced_bytes})" if replaced_bytes else ""
        raise QuotaExceeded(
            f"{who} {used_bytes} bytes: {size_bytes} more{replaced} would pass the quota of {quota_bytes}; "
            "delete some of these sessions, or raise tenants.quota_bytes (or the quota of the tenant's rule)"
        )


@dataclass(frozen=True)
class TenantRule:
    """Sessions whose id begins with `prefix` are `tenant`'s. `quota_bytes` 0: the quota of all tenants."""

    prefix: str
    tenant: str
    quota_bytes: int = 0


@dataclass(frozen=True)
class TenantRules:
    """Whose a session is, and how much each tenant may store. `quota_bytes` 0: no bound.

    Raises:
        ConfigError: negative quotas, a prefix with two tenants, a tenant with two quotas.
    """

    separator: str
    quota_bytes: int
    rules: tuple[TenantRule, ...]

    def __post_init__(self) -> None:
        tenants: dict[str, str] = {}
        quotas: dict[str, int] = {}
        for rule in self.rules:
            if tenants.setdefault(rule.prefix, rule.tenant) != rule.tenant:
                raise ConfigError(
                    f"tenants.rules: prefix {rule.prefix!r} has the tenants {tenants[rule.prefix]!r} and "
                    f"{rule.tenant!r}; expected one"
                )
            if rule.quota_bytes and quotas.setdefault(rule.tenant, rule.quota_bytes) != rule.quota_bytes:
                raise ConfigError(
                    f"tenants.rules: tenant {rule.tenant!r} has the quotas {quotas[rule.tenant]} and "
                    f"{rule.quota_bytes}; expected one"
                )
        if min(self.quota_bytes, *quotas.values(), 0) < 0:
            raise ConfigError(f"tenants: quotas {self.quota_bytes}, {quotas}: expected 0 or more of each")

    def tenant_of(self, session_id: str) -> str:
        """The tenant of the longest prefix that fits, else the part before the separator; "" when none."""
        fitting = [rule for rule in self.rules if session_id.startswith(rule.prefix)]
        if fitting:
            return max(fitting, key=lambda rule: len(rule.prefix)).tenant
        if not self.separator:
            return ""
        tenant, separator, _ = session_id.partition(self.separator)
        return tenant if separator else ""

    def quota_of(self, tenant: str) -> int:
        """Bytes the tenant may store; 0: no bound."""
        own = (rule.quota_bytes for rule in self.rules if rule.tenant == tenant and rule.quota_bytes)
        return next(own, self.quota_bytes)
