"""What a request of SGLang tells about its session, and what its answer tells about the restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_krul.errors import InvalidSessionId
from sgl_krul.session.private import looks_private, private_key
from sgl_krul.session.record import SessionKey, validate_session_id

__all__ = [
    "annotate",
    "private_request",
    "refuse_private_keys",
    "session_key",
    "was_aborted",
    "why_not_pausable",
]


def session_key(obj: Any) -> SessionKey:
    """The session a request names. Salts that are lists belong to batches, which are never paused.

    Raises:
        ValueError: a bad id; SGLang answers 400.
    """
    try:
        session_id = validate_session_id(obj.session_id)
    except InvalidSessionId as error:
        raise ValueError(str(error)) from error
    salts = [getattr(obj, name, None) for name in ("cache_salt", "extra_key")]
    return SessionKey(session_id, *(salt if isinstance(salt, str) and salt else None for salt in salts))


def refuse_private_keys(obj: Any) -> None:
    """A request may not name the private namespace of a session: what lies there is that session's alone.

    Raises:
        ValueError: it does; SGLang answers 400.
    """
    given = getattr(obj, "extra_key", None)
    for extra_key in given if isinstance(given, list) else [given]:
        if looks_private(extra_key):
            raise ValueError(
                f"extra_key {extra_key!r} ends as those of private sessions do (krul:<digest>:<number>), "
                "expected any other text: send the chat's own extra_key, and its session_id"
            )


@contextmanager
def private_request(obj: Any, key: SessionKey, generation: int | None) -> Iterator[None]:
    """Until the `with` ends the request is one of the session's private namespace, if it has one.

    SGLang reads the key until the request has its first output; whoever made the object finds it as it was.
    The items of a batch that have salts of their own belong to other sessions: they stay as they are.
    """
    own_salts = any(isinstance(getattr(obj, name, None), list) for name in ("cache_salt", "extra_key"))
    if generation is None or own_salts:
        yield
        return
    before = obj.extra_key
    obj.extra_key = private_key(key, generation).extra_key
    try:
        yield
    finally:
        obj.extra_key = before


def why_not_pausable(obj: Any) -> str:
    """Empty for a plain chat request."""
    sampling = getattr(obj, "sampling_params", None)
    ids = getattr(obj, "input_ids", None)
    if (
        isinstance(getattr(obj, "text", None), list)
        or isinstance(sampling, list)
        or (ids and isinstance(ids[0], list))
    ):
        return "it was used for a batch of prompts"
    if isinstance(sampling, dict) and (sampling.get("n") or 1) > 1:
        return "it was used with n > 1"
    if not hasattr(obj, "return_logprob"):
        return "it was used for embeddings"
    if any(getattr(obj, name, None) for name in ("image_data", "video_data", "audio_data", "input_embeds")):
        return "it was used with images, audio, video or embeddings"
    return ""


def was_aborted(out: Any) -> bool:
    """True for the answer of a request that was rejected or aborted."""
    meta = out.get("meta_info") if isinstance(out, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort"


def annotate(out: Any, report: dict[str, Any], held_ms: float, *, exact: bool = True) -> Any:
    """Tell in `meta_info` how many tokens really came from the store. `report` is the answer to the hold,
    `exact` says whether the session's KV is what the model made.
    """
    meta = out.get("meta_info") if isinstance(out, dict) else None
    if isinstance(meta, dict):
        restored = _count_restored(meta, report)
        origin = report.get("restored_from", "nowhere")
        if origin == "nowhere":
            origin = "memory"  # the write-through had kept them
        meta["krul"] = {
            "restored_tokens": restored,
            "restored_from": origin if restored else "nowhere",
            "recomputed_tokens": round(report.get("recomputed_tokens", 0)) if restored else 0,
            "held_ms": held_ms,
            "corrupt_chunks": report.get("corrupt_chunks", 0),
            "reason": report.get("reason", ""),
            "exact": exact,
        }
    return out


def _count_restored(meta: dict[str, Any], report: dict[str, Any]) -> int:
    """What SGLang loaded from memory, or found on the device because the hold had put it there.

    To SGLang the latter was cached on the device; its details get to say where it came from.
    """
    details = meta.get("cached_tokens_details") or {}
    loaded = int(details.get("host", 0))
    if report.get("restored_to") != "device":
        return loaded
    in_place = min(int(report["restored_tokens"]), int(meta.get("cached_tokens", 0)))
    brought = max(0, in_place - int(report.get("on_device_tokens", 0)))
    if "device" in details:
        brought = min(brought, int(details["device"]))
        meta["cached_tokens_details"] = details | {
            "device": details["device"] - brought,
            "host": loaded + brought,
        }
    return loaded + brought
