"""What each tenant stores, and whether it may store more."""

from __future__ import annotations

from threading import Lock

from sgl_krul.config import TenantsConfig
from sgl_krul.errors import QuotaExceeded
from sgl_krul.service.agreement import Agreement, Alone
from sgl_krul.session.registry import Registry, Session
from sgl_krul.store.placement import TenantRule, TenantRules, check_quota

__all__ = ["Tenants"]


class Tenants:
    """Quotas over the sessions of a registry. A session counts once, however many tiers have a copy."""

    def __init__(self, config: TenantsConfig, registry: Registry, ranks: Agreement | None = None) -> None:
        self._registry = registry
        self._ranks = Alone() if ranks is None else ranks
        self._lock = Lock()
        self._claims: dict[str, int] = {}  # bytes that are being written, by session
        self._claimants: dict[str, Session] = {}
        self._rules = TenantRules(
            config.separator,
            config.quota_bytes,
            tuple(TenantRule(rule.prefix, rule.tenant, rule.quota_bytes) for rule in config.rules),
        )

    def claim(self, session: Session, size_bytes: int) -> None:
        """`require_room`, and count these bytes for it until `settle`: it is being written.

        Raises:
            QuotaExceeded
        """
        with self._lock:
            refused = self._refusal(session, size_bytes)
            # Sizes are those of a rank's own copies, which may differ after a damage.
            if self._ranks.size > 1 and not self._ranks.agree_min([refused is None])[0]:
                refused = refused or QuotaExceeded(
                    f"session {session.session_id!r} is over its quota on another rank: delete sessions"
                )
            if refused is not None:
                raise refused
            self._claims[session.digest] = size_bytes
            self._claimants[session.digest] = session

    def settle(self, session: Session) -> None:
        """The writing is over: what is stored counts again."""
        self._claims.pop(session.digest, None)
        self._claimants.pop(session.digest, None)

    def require_room(self, session: Session, size_bytes: int) -> None:
        """Let `session` be stored with `size_bytes`.

        Raises:
            QuotaExceeded
        """
        tenant = self._rules.tenant_of(session.session_id)
        quota = self._rules.quota_of(tenant)
        if not quota:
            return
        used = sum(
            size
            for other in {
                other.digest: other for other in (*self._registry, *self._claimants.values())
            }.values()
            if (size := self._stored(other)) and self._rules.tenant_of(other.session_id) == tenant
        )
        replaced = self._stored(session)
        check_quota(tenant, used, replaced, size_bytes, quota)

    def _refusal(self, session: Session, size_bytes: int) -> QuotaExceeded | None:
        try:
            self.require_room(session, size_bytes)
        except QuotaExceeded as error:
            return error
        return None

    def _stored(self, session: Session) -> int:
        stored = session.paused.stored_bytes if session.paused is not None else 0
        return self._claims.get(session.digest, stored)
