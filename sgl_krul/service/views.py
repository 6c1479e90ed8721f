"""Sessions and tiers as the API shows them."""

from __future__ import annotations

from dataclasses import asdict

from sgl_krul.service.counters import Counters
from sgl_krul.service.jobs import Body
from sgl_krul.session.registry import MEMORY, Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tiered import TieredStore

__all__ = ["describe", "overview"]


def describe(session: Session) -> Body:
    """One session."""
    paused = session.paused
    resting = paused is not None and session.state is not State.ACTIVE
    tiers = list(paused.tiers) if resting and paused is not None else []
    if resting and session.in_memory and MEMORY not in tiers:
        tiers.insert(0, MEMORY)
    return {
        "session_id": session.session_id,
        "salted": session.salted,
        "state": session.state.value,
        "tokens": session.tokens,
        "stored_tokens": paused.stored_tokens if paused else 0,
        "bytes_raw": paused.raw_bytes if paused else 0,
        "bytes_stored": paused.stored_bytes if paused else 0,
        "tier": tiers[0] if tiers else "device",
        "tiers": tiers,
        "exact": session.exact,
        "lossy_since": session.private,
        "layer_plan": paused.layer_plan if paused else "raw",
        "layer_modes": list(paused.layer_modes) if paused else [],
        "expected_loss": paused.loss if paused else 0.0,
        "corrupt_chunks": session.corrupt_chunks,
        "last_used": session.last_used,
    }


def overview(
    sessions: list[Body], memory: MemoryTier, store: TieredStore, counters: Counters, namespace: str
) -> Body:
    """All sessions (as described), the tiers and the counters."""
    usage = {memory.name: memory.usage()} | store.usage()
    return {
        "sessions": sessions,
        "tiers": {
            name: tier._asdict() | {"breaker": store.breaker_state(name)} for name, tier in usage.items()
        },
        "counters": asdict(counters),
        "namespace": namespace,
    }
