"""What a request of SGLang tells about its session, and what its answer tells about the restore."""

from __future__ import annotations

from typing import Any

from sgl_krul.errors import InvalidSessionId
from sgl_krul.session.record import SessionKey, validate_session_id

__all__ = ["annotate", "session_key", "was_aborted", "why_not_pausable"]


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


def annotate(out: Any, report: dict[str, Any], held_ms: float) -> Any:
    """Tell in `meta_info` how many tokens really came from the store. `report` is the answer to the hold."""
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
