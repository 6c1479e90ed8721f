"""A restore to the device as all ranks agree on it: what there is to restore, and the plan."""

from __future__ import annotations

import json
from dataclasses import asdict

from sgl_krul.restore.plan import RestorePlan
from sgl_krul.restore.planner import Strategy
from sgl_krul.service.agreed import agree_on_report, common_chunks
from sgl_krul.service.agreement import Agreement
from sgl_krul.service.prepared import Prepared

__all__ = ["agree_on_plan", "agree_on_prepared"]


def agree_on_prepared(prepared: Prepared, ranks: Agreement) -> bool:
    """Leave out what not every rank has; returns whether all of the rest is in every rank's memory."""
    if ranks.size == 1:
        return prepared.all_in_memory
    alike = agree_on_report(prepared.report, prepared.layout.page_size, ranks)
    common = common_chunks([source.ref for source in prepared.chunks], ranks) if alike else 0
    if common < len(prepared.chunks):
        prepared.report.end("missing", "another rank has less of the session")
    prepared.limit(sum(source.ref.tokens for source in prepared.chunks[:common]))
    return bool(ranks.agree_min([prepared.all_in_memory])[0])


def agree_on_plan(plan: RestorePlan, ranks: Agreement) -> RestorePlan:
    """The plan of the first rank: each has measured its own rates."""
    if ranks.size == 1:
        return plan
    fields = json.loads(ranks.gather(json.dumps(asdict(plan)))[0])
    fields |= {"strategy": Strategy(fields["strategy"]), "staircase": tuple(fields["staircase"])}
    return RestorePlan(**fields)
