"""All slower tiers of a server behind one manager: which one takes a session, which one is asked first.

It knows places and bytes. What a session is, and how it is read or copied, is the business of those above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from sgl_krul.errors import StoreUnavailable
from sgl_krul.store.placement import Place, Policy, select_places
from sgl_krul.store.tier import BudgetedTier, CheckedTier, SharedTier, TierUsage

__all__ = ["TieredStore"]


class TieredStore:
    """The tiers below memory, fastest first: the server's own disk, then the one that servers share.

    Either may be None; with neither the store is empty (false), and sessions rest in memory only. Safe to be
    used by several threads.
    """

    def __init__(
        self, ssd: CheckedTier | None = None, shared: SharedTier | None = None, *, policy: Policy
    ) -> None:
        self.policy = policy
        self.shared = shared
        self._ssd = ssd
        self.tiers: tuple[CheckedTier, ...] = tuple(tier for tier in (ssd, shared) if tier is not None)

    def __bool__(self) -> bool:
        return bool(self.tiers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiers, fastest first."""
        return tuple(tier.name for tier in self.tiers)

    def tier(self, name: str) -> CheckedTier:
        """The tier of that name; KeyError when there is none."""
        return {tier.name: tier for tier in self.tiers}[name]

    def choose(self, names: Iterable[str]) -> tuple[CheckedTier, ...]:
        """Those of the named tiers that this server has, fastest first."""
        wanted = set(names)
        return tuple(tier for tier in self.tiers if tier.name in wanted)

    def is_shared(self, tier: CheckedTier) -> bool:
        """True for a tier that other servers write too."""
        return tier is self.shared

    def in_shared(self, names: Iterable[str]) -> bool:
        """Whether the shared tier is among the named."""
        return self.shared is not None and self.shared.name in names

    def available(self, tier: CheckedTier) -> bool:
        """False for a shared tier known to be out of reach. Never waits."""
        return self.shared is None or tier is not self.shared or self.shared.available

    def places(self, held: Mapping[str, int] | None = None) -> tuple[Place, ...]:
        """The tiers as placement sees them; `held`: bytes by tier that a write would replace."""
        held = held or {}
        return tuple(self._place(tier, held.get(tier.name, 0)) for tier in self.tiers)

    def targets(self, size_bytes: int, held: Mapping[str, int]) -> list[CheckedTier]:
        """Which tiers should take a session of that size, those to fall back on last.

        Where none has room by what is known here, the wanted ones are still named: they say best why not.
        """
        chosen = select_places(size_bytes, self.places(held), self.policy)
        if not chosen:
            chosen = self.names if self.policy.replicate == "both" else (self.policy.replicate,)
        return list(self.choose(chosen) or self.tiers)

    def passed_over(self, targets: Sequence[CheckedTier]) -> dict[str, str]:
        """The tiers that should have a copy by the policy and are not among `targets`, each with why."""
        return {
            tier.name: "it has no room" if self.available(tier) else "it is out of reach"
            for tier in self.choose(self.policy.wanted)
            if tier not in targets
        }

    def others(self, tiers: Sequence[CheckedTier]) -> list[CheckedTier]:
        """The tiers that are not among these and can be reached."""
        return [tier for tier in self.tiers if tier not in tiers and self.available(tier)]

    def leased(self, prefix: str, tier: CheckedTier) -> AbstractContextManager[None]:
        """Be the only server that writes below `prefix` in this tier, while the `with` lasts.

        Raises:
            LeaseHeld, StoreUnavailable
        """
        if self.shared is not None and tier is self.shared:
            return self.shared.lease(prefix)
        return nullcontext()

    def touch(self, keys: Sequence[str]) -> None:
        """A session is in use: its objects in the shared tier live on. Best effort."""
        if self.shared is not None and self.shared.available:
            self.shared.touch(keys)

    def refresh(self) -> None:
        """Count anew what other servers changed. Waits for I/O; an unreachable tier is left as it was."""
        if self.shared is not None and self.shared.available:
            try:
                self.shared.refresh()
            except StoreUnavailable:
                return  # it says so by `available` and in the metrics

    def usage(self) -> dict[str, TierUsage]:
        """Bytes and objects by tier, answered from memory."""
        return {tier.name: tier.usage() for tier in self.tiers}

    def breaker_state(self, name: str) -> str | None:
        """State of the tier's circuit breaker; None where there is none."""
        return self.shared.breaker_state if self.shared is not None and name == self.shared.name else None

    def check(self) -> list[str]:
        """Problems found in the tiers; empty when sound."""
        return [problem for tier in self.tiers for problem in tier.check()]

    def _place(self, tier: CheckedTier, held_bytes: int) -> Place:
        usage = tier.usage()
        return Place(
            name=tier.name,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=max(0, usage.bytes - held_bytes),
            available=self.available(tier),
            write_left_bytes=tier.write_left_bytes if isinstance(tier, BudgetedTier) else None,
        )
