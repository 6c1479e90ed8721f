"""The backend `krul`: its factory, and the functions of SGLang it wraps. compat.py has what it requires."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sgl_krul.config import Config, resolve_config
from sgl_krul.engine.compat import (
    BACKEND,
    Hook,
    apply_hooks,
    apply_late_hooks,
    require_flags,
    require_hooks,
    require_version,
)
from sgl_krul.engine.frontend import FrontEnd
from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput, register_messages
from sgl_krul.engine.request import refuse_private_keys
from sgl_krul.service.places import check_places
from sgl_krul.service.share import check_share

__all__ = ["create_cache", "probe_hooks", "register"]

_SOON_TOKENS = 256

MakeRouter = Callable[[FrontEnd], Any]


def register(make_router: MakeRouter) -> None:
    """Hook this SGLang process. `make_router(front_end)` gives the FastAPI router with the session routes."""
    require_version()
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sgl_krul.engine.cpu_attention import register_cpu_backend

    register_cpu_backend()
    register_messages()
    register_radix_cache_backend(BACKEND, create_cache)
    apply_hooks(_hooks(make_router))


def _hooks(make_router: MakeRouter | None = None) -> list[Hook]:
    """The hooks of this process. A child that has not loaded the scheduler (the detokenizer) needs none."""
    hooks: list[Hook] = []
    if multiprocessing.parent_process() is None:
        manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
        hooks += [
            ("sglang.srt.server_args.ServerArgs.check_server_args", "AFTER", after_check_server_args),
            (f"{manager}.__init__", "AFTER", after_tokenizer_manager_init(make_router)),
            (f"{manager}.generate_request", "AROUND", around_generate_request),
        ]
    elif "sglang.srt.managers.scheduler" in sys.modules:
        components = "sglang.srt.managers.scheduler_components"
        pool = f"{components}.pool_stats_observer.SchedulerPoolStatsObserver"
        updater = f"{components}.weight_updater.SchedulerWeightUpdaterManager"
        hooks += [
            ("sglang.srt.managers.scheduler.Scheduler.__init__", "AFTER", after_scheduler_init),
            ("sglang.srt.managers.scheduler.Scheduler.on_idle", "AFTER", after_on_idle),
            (
                "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
                "AFTER",
                after_paused_round,
            ),
            ("sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle", "AROUND", around_sleep_on_idle),
            (
                "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version",
                "AROUND",
                around_new_version,
            ),
            (f"{pool}.session_held_tokens", "AFTER", after_held_tokens),
            (
                "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
                "AROUND",
                around_decode_mem,
            ),
            (f"{updater}.end_weight_update", "AROUND", around_end_of_update),
            (f"{updater}.check_weights", "AROUND", around_check_weights),
        ]
        hooks += [
            (f"{updater}.update_weights_from_{source}", "AROUND", around_weight_update)
            for source in ("disk", "distributed", "tensor", "ipc")
        ]
    return hooks


def probe_hooks(probe: Any) -> list[Hook]:
    """The hooks of a `RowProbe`. Not applied where the estimator is off: nothing is wrapped there."""
    forward_batch = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
    attention = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    return [
        (f"{forward_batch}.init_new", "AFTER", probe.after_init_new),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", "AROUND", probe.around_forward),
        (f"{attention}.forward", "AROUND", probe.around_attention),
    ]


# ---- scheduler process ----


def create_cache(ctx: Any) -> Any:
    """The radix cache factory for `--radix-cache-backend krul`.

    Raises:
        UnsupportedServer, ConfigError, StoreUnavailable: before anything is served.
    """
    from sglang.srt.runtime_context import get_memory

    from sgl_krul.engine.build import build_cache

    require_version()
    require_flags(ctx.server_args)
    require_hooks(_hooks())
    cache = build_cache(ctx, _config(get_memory().unified_cache_external_linker_config))
    if cache.row_probe is not None:
        apply_late_hooks(probe_hooks(cache.row_probe))
    return cache


def after_scheduler_init(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Let the scheduler drive our linker, and give the control step its channel."""
    from sglang.utils import TypeBasedDispatcher

    control = _control(scheduler)
    if control is None:
        return
    scheduler.enable_unified_cache_external_linker = True
    control.connect(
        scheduler.send_control_output,
        others_run=lambda: not scheduler.is_fully_idle(),
        others_need=lambda: _growth(scheduler),
    )
    control.test_recompute()
    scheduler._request_dispatcher += TypeBasedDispatcher(  # noqa: SLF001
        [(KrulControlReqInput, control.handle)]
    )


def after_on_idle(_result: None, scheduler: Any) -> None:
    """While workers run, an idle scheduler naps between its rounds instead of holding the interpreter."""
    control = _control(scheduler)
    if control is not None and (control.working or control.estimating) and not control.computing:
        control.nap()


def _growth(scheduler: Any) -> int:
    """Device slots that requests which run or wait may soon take. Most end before their limit: should it not
    be enough, `around_decode_mem` gives more.
    """
    page_size = scheduler.tree_cache.page_size
    growth = 0
    for req in scheduler.running_batch.reqs:
        growth += min(req.sampling_params.max_new_tokens - len(req.output_ids), _SOON_TOKENS) + page_size
    for req in scheduler.waiting_queue:
        growth += len(req.origin_input_ids) + min(req.sampling_params.max_new_tokens, _SOON_TOKENS)
    return growth


def around_decode_mem(original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any) -> bool:
    """Before SGLang sends running requests back for want of slots, or ends one: ours go first."""
    control = _control(batch)
    while not original(batch, *args, **kwargs):
        if control is None or not control.give_room():
            return False
    return True


def after_held_tokens(result: int, observer: Any) -> int:
    """Slots that restores have reserved are held, not lost: SGLang counts its pool when idle."""
    control = _control(observer)
    return result if control is None else result + int(control.held_tokens)


def after_paused_round(_result: None, scheduler: Any) -> None:
    """While generation is paused the scheduler only takes messages: finished work waits for us."""
    if _control(scheduler) is not None:
        scheduler.tree_cache.check_hicache_events()


def around_sleep_on_idle(original: Callable[[Any], None], scheduler: Any) -> None:
    """With --sleep-on-idle the scheduler sleeps until a message comes; finished work sends it none."""
    control = _control(scheduler)
    if control is None or not control.working:
        original(scheduler)


def around_weight_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """After the weights changed, KV of the old ones is another namespace's."""
    control = _control(updater.scheduler)
    if control is None:
        return original(updater, request)
    path = getattr(request, "model_path", None)
    if getattr(request, "load_format", None) not in (None, "auto", "safetensors", "pt"):
        path = None  # what was loaded need not be what the files hold
    version = getattr(request, "weight_version", None)
    flushes = control.flushes
    changed = True
    try:
        result = original(updater, request)
        # A failed load from disk is rolled back by SGLang; the other ways may have changed a part.
        changed = path is None or bool(getattr(result, "success", True)) or control.flushes != flushes
        changed = control.on_any_rank(changed)
    finally:
        if changed:
            control.weights_changed(
                None if path is None else Path(path), version, flushed=control.flushes != flushes
            )
    return result


def around_new_version(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Somebody names the weights anew: weights that came by a way SGLang did not see, for all we know."""
    result = original(scheduler, request)
    control = _control(scheduler)
    if control is not None:
        control.weights_changed(None, request.new_version, flushed=False)
    return result


def around_end_of_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """An update in which nothing was loaded through SGLang was written to the device from outside."""
    session = updater._session  # noqa: SLF001
    result = original(updater, request)
    control = _control(updater.scheduler)
    if control is not None and session is not None and not session.loaded_weights:
        control.weights_changed(None, None, flushed=False)
    return result


def around_check_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """A check may also overwrite the weights."""
    result = original(updater, request)
    control = _control(updater.scheduler)
    if control is not None and request.action not in ("snapshot", "compare", "checksum"):
        control.weights_changed(None, None, flushed=False)
    return result


def _control(scheduler: Any) -> Any:
    """Our control object, or None when another cache is in use."""
    return getattr(getattr(scheduler, "tree_cache", None), "krul_control", None)


# ---- front-end process ----


def after_check_server_args(_result: None, server_args: Any) -> None:
    """Refuse early, in the process the operator looks at."""
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(server_args)
    if resolved.radix_cache_backend == BACKEND:
        require_flags(resolved)
        config = _config(resolved.unified_cache_external_linker_config)
        check_places(config)
        check_share(config, resolved.tp_size)


def after_tokenizer_manager_init(make_router: MakeRouter | None) -> Callable[..., None]:
    """A hook that attaches the front end and, where there is an HTTP server, the session routes."""

    def hook(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_memory
        from sglang.utils import TypeBasedDispatcher

        if get_memory().radix_cache_backend != BACKEND:
            return
        require_hooks(_hooks())
        front = FrontEnd(
            _config(get_memory().unified_cache_external_linker_config),
            send=manager._dispatch_to_scheduler,  # noqa: SLF001
            listen=manager.auto_create_handle_loop,
        )
        manager.krul_front_end = front
        manager._result_dispatcher += TypeBasedDispatcher(  # noqa: SLF001
            [(KrulControlReqOutput, front.on_answer)]
        )
        http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
        if http_server is not None and make_router is not None:
            http_server.app.include_router(make_router(front))

    return hook


def around_generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Requests that name a session go through the front end; all others are left alone."""
    front = getattr(manager, "krul_front_end", None)
    if front is not None:
        refuse_private_keys(obj)  # also where no session is named: it would match one's pages
    if front is None or getattr(obj, "session_id", None) is None:
        return original(manager, obj, request)
    stream: AsyncIterator[Any] = front.serve(lambda: original(manager, obj, request), obj)
    return stream


def _config(linker_config: Any) -> Config:
    return resolve_config(None if linker_config is None else json.dumps(linker_config), os.environ)
