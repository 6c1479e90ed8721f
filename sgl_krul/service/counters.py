"""What happened since the server started."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass
class Counters:
    """Totals; they only grow. `holes`: restores that were cut short. `demotions`: sessions moved to a slower
    tier in the background. `lossy_resumes`: restores into a private cache namespace; `duplicated_tokens`: of
    what they brought, tokens that memory has exactly too."""

    pauses: int = 0
    pauses_failed: int = 0
    resumes: int = 0
    restored_tokens: int = 0
    holes: int = 0
    corrupt_chunks: int = 0
    corrupt_manifests: int = 0
    missing_chunks: int = 0
    orphans_removed: int = 0
    demotions: int = 0
    demotions_failed: int = 0
    expired: int = 0
    lossy_resumes: int = 0
    duplicated_tokens: int = 0
    evictions: int = 0
