"""The estimator of one scheduler process, put together: probe, background thread, and what joins them."""

from __future__ import annotations

from array import array
from typing import Any

from sgl_krul.config import EstimatorConfig, QualityConfig
from sgl_krul.engine.cache import KrulCache
from sgl_krul.engine.estimates import SessionEstimates
from sgl_krul.engine.forward_rows import QueryShape
from sgl_krul.engine.linker import KrulLinker
from sgl_krul.engine.page_keys import MemoryKeys
from sgl_krul.engine.probe import RowProbe
from sgl_krul.engine.recompute_attention import attention_layers, why_not_plain
from sgl_krul.errors import UnsupportedServer
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import MetricsSink
from sgl_krul.service.estimates import Estimates, NoEstimates
from sgl_krul.session.record import SessionKey, page_key
from sgl_krul.similarity import Estimator, QueryKeep, Windows, sampled_positions

__all__ = ["open_estimates"]

_MAX_REQUESTS = 4096  # of sessions, watched at once
_MAX_QUERIES = 64  # of a session, kept for pauses


def open_estimates(
    config: EstimatorConfig,
    quality: QualityConfig,
    cache: KrulCache,
    linker: KrulLinker,
    layout: KvLayout,
    runner: Any,
    metrics: MetricsSink,
) -> Estimates:
    """What estimates in this process. Sets `cache.row_probe`, whose hooks are yet to be applied.

    The budget has two halves: one for queries of requests that run, one for the thread.

    Raises:
        UnsupportedServer: the model's attention is not what an estimate is made of.
    """
    if not config.enabled:
        return NoEstimates()
    shape, scale = _queries(runner, layout)

    def sample(digest: str, start: int, end: int) -> Any:
        return sampled_positions(linker.namespace, digest, start, end, config.rows_per_1000)

    def open_keys(key: SessionKey, token_ids: array[int]) -> MemoryKeys:
        names = [page_key(linker.namespace, page_hash) for page_hash in cache.page_hashes(key, token_ids)]
        return MemoryKeys(linker.memory, layout, names, linker.write_through.barrier)

    half = config.budget_bytes // 2
    probe = RowProbe(sample, shape, linker.pages.device, half, _MAX_REQUESTS)
    estimates = SessionEstimates(
        Estimator(half, windows=Windows(config.windows)),
        probe,
        open_keys,
        metrics,
        layers=layout.layers,
        scale=scale,
        page_size=layout.page_size,
        gamma=config.gamma,
        kept=QueryKeep(quality.queries_bytes, quality.tokens, _MAX_QUERIES) if quality.codes else None,
    )
    cache.row_probe = probe
    cache.on_rows = estimates.finished
    cache.on_rejected = estimates.discard
    return estimates


def _queries(runner: Any, layout: KvLayout) -> tuple[QueryShape, float]:
    """The shape of a token's queries, and the scale of q.k; the same in all layers."""
    layers = list(attention_layers(runner.model))
    kinds = {(layer.tp_q_head_num, layer.qk_head_dim, float(layer.scaling)) for layer in layers}
    problem = next((why for why in map(why_not_plain, layers) if why), "")
    one_each = [layer.layer_id for layer in layers] == list(range(layout.layers))
    if not problem and not (one_each and len(kinds) == 1):
        problem = f"it has {len(layers)} attention layers of {len(kinds)} kinds, with KV for {layout.layers}"
    if problem:
        raise UnsupportedServer(
            f"estimator.enabled: the attention of this model can't be estimated: {problem}. Use another "
            "model, or set estimator.enabled to false."
        )
    ((heads, head_dim, scale),) = kinds
    return QueryShape(layout.layers, heads, head_dim, runner.dtype), scale
