"""Put the pieces of one scheduler process together: pool, tiers, service, linker, cache, control."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sgl_krul.config import Config, cache_home
from sgl_krul.engine.cache import KrulCache
from sgl_krul.engine.control import SessionControl
from sgl_krul.engine.estimates_build import open_estimates
from sgl_krul.engine.identity import Identity, model_settings
from sgl_krul.engine.linker import KrulLinker
from sgl_krul.engine.pool import KvPages, read_layout
from sgl_krul.engine.ranks import in_turn, ranks_of
from sgl_krul.engine.recompute import Recomputer
from sgl_krul.engine.restore_job import EngineDevice
from sgl_krul.errors import UnsupportedServer
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import Metrics, MetricsSink, NoMetrics
from sgl_krul.restore.rate_book import RateBook, machine_fingerprint
from sgl_krul.service import SessionService
from sgl_krul.service.places import open_store, read_archive_key
from sgl_krul.service.share import check_share, share_of
from sgl_krul.store.memory import MemoryTier

__all__ = ["build_cache"]

_ROPE_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "max_position_embeddings",
)


def build_cache(ctx: Any, config: Config) -> KrulCache:
    """Build the cache for SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedServer: a model whose KV can't be stored, or (with the estimator on) not estimated.
        StoreUnavailable: the store directory can't be used.
    """
    cache: KrulCache = create_unified_radix_cache(ctx, cache_class=KrulCache)
    if set(cache.components) != {ComponentType.FULL} or cache.tree_core.is_eagle:
        names = ", ".join(sorted(component.name for component in cache.components))
        raise UnsupportedServer(
            f"this model keeps {names} state; --radix-cache-backend krul serves models with full "
            f"attention only"
        )
    ranks = ranks_of(cache)
    check_share(config, ranks.size)
    config = share_of(config, ranks.rank, ranks.size)
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    layout = read_layout(pool, cache.page_size, _rope(ctx.model_config.hf_config))
    identity = Identity(
        layout,
        ctx.server_args.weight_version,
        model_settings(ctx.server_args, ctx.model_config.hf_config),
        str(ctx.server_args.load_format),
        cache_home(os.environ) / "fingerprints.json",
        ranks.rank,
        ranks.size,
    )
    # The first rank reads every byte of the model; the others find in the file what it remembered.
    namespace = in_turn(ranks, lambda: identity.of_model(Path(ctx.model_config.model_path)))
    memory = MemoryTier(layout.layers, layout.page_segment_bytes, config.memory.capacity_bytes)
    linker = KrulLinker(
        KvPages(pool, layout),
        memory,
        namespace,
        max_layer_wait_s=config.restore.max_layer_wait_s,
        forward_stream=ctx.tp_worker.model_runner.forward_stream,
        ranks=ranks,
    )
    cache.init_cache_linker(linker)
    pool.register_layer_transfer_counter(linker.layer_done_counter)
    ctx.tp_worker.register_hicache_layer_transfer_counter(linker.layer_done_counter)
    metrics = _metrics()
    estimates = open_estimates(
        config.estimator, config.quality, cache, linker, layout, ctx.tp_worker.model_runner, metrics
    )
    service = SessionService(
        config,
        layout,
        namespace,
        memory,
        open_store(config),
        cache.page_hashes,
        read_archive_key(config, cache_home(os.environ)),
        metrics,
        rates=_rates(config, layout, namespace, linker.pages.device),
        ranks=ranks,
        estimates=estimates,
    )
    recomputer = Recomputer(ctx.tp_worker.model_runner, layout)
    device = EngineDevice(cache, linker.pages, recomputer)
    cache.krul_control = SessionControl(service, cache, linker, identity, device)
    return cache


def _rates(config: Config, layout: KvLayout, namespace: str, device: torch.device) -> RateBook:
    """What this machine was measured at before, with this model and these places."""
    fingerprint = machine_fingerprint(
        host=platform.node(),
        machine=platform.machine(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        layers=layout.layers,
        namespace=namespace,
        places=repr((config.ssd, config.redis, config.link)),
    )
    path = config.restore.rates_file or cache_home(os.environ) / "rates" / f"{fingerprint}.json"
    return RateBook(path, fingerprint)


def _processor() -> str:
    """The processor's name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _metrics() -> MetricsSink:
    """With --enable-metrics, beside SGLang's own on /metrics and under its labels. One a process."""
    observability, parallel = get_observability(), get_parallel()
    if not observability.enable_metrics:
        return NoMetrics()
    labels = {"model_name": get_serving().served_model_name, "tp_rank": parallel.tp_rank}
    labels |= {"pp_rank": parallel.pp_rank} | (observability.extra_metric_labels or {})
    return Metrics({name: str(value) for name, value in labels.items()})


def _rope(hf_config: Any) -> str:
    """The position encoding, as text: K is stored rotated, so it is part of a session's identity."""
    fields = {name: getattr(hf_config, name, None) for name in _ROPE_FIELDS}
    return json.dumps(fields, sort_keys=True, default=str)
