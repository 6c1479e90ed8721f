"""SGLang's radix cache with sessions: remembers where each stands, and frees the pages that are its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_krul.session.private import caller_key
from sgl_krul.session.record import SessionKey

__all__ = ["DevicePath", "KrulCache"]


@dataclass(frozen=True)
class DevicePath:
    """A session's leading tokens on the device, locked in the tree until `KrulCache.unlock_path`."""

    node: int
    tokens: int
    indices: torch.Tensor
    receipt: DecLockRefParams


class KrulCache(UnifiedRadixCache):
    """A UnifiedRadixCache that reports finished requests of sessions and gives the control step its turn."""

    # The caller's key, the tokens, the last page's hash, whether it was aborted, its private namespace.
    on_finished: Callable[[SessionKey, array[int], str | None, bool, int | None], None] | None = None
    on_first_token: Callable[[SessionKey], None] | None = None
    on_step: Callable[[], None] | None = None
    on_reset: Callable[[], None] | None = None
    on_rows: Callable[[str, SessionKey, array[int]], None] | None = None
    on_rejected: Callable[[str], None] | None = None
    row_probe: Any = None
    krul_control: Any = None
    epoch = 0  # counts flushes: a lock taken in an earlier epoch is gone

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert as SGLang does; a finished request of a session is that session's state from now on."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.on_finished is None or req.session_id is None:
            return
        in_cache = SessionKey(req.session_id, req.cache_salt or None, req.extra_key or None)
        key, private = caller_key(in_cache)
        if self.on_first_token is not None and len(req.output_ids) == 1:
            self.on_first_token(key)
        if not req.finished():
            return
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if not (aborted and req.finished_reason.status_code):  # rejected: SGLang ran a stand-in of one token
            token_ids = array("q", req.full_untruncated_fill_ids[:up_to])
            self.on_finished(key, token_ids, self.get_last_hash_value(req.last_node), aborted, private)
            if self.on_rows is not None:
                self.on_rows(req.rid, in_cache, token_ids)
        elif self.on_rejected is not None:
            self.on_rejected(req.rid)

    def check_hicache_events(self) -> None:
        """Called by the scheduler in every round."""
        self.drain_offloads()
        if self.on_step is not None:
            self.on_step()

    def drain_offloads(self) -> None:
        """Take finished write-throughs, which unlocks their nodes."""
        super().check_hicache_events()

    def reset(self) -> None:
        """Flush the device: pauses under way must stop reading from it first."""
        if self.on_reset is not None:
            self.on_reset()
        self.epoch += 1
        super().reset()

    def page_hashes(self, key: SessionKey, token_ids: array[int]) -> tuple[str, ...]:
        """SGLang's chained hashes (hex) of the full pages of `token_ids`."""
        radix_key = self.radix_key(key, token_ids)
        return (
            tuple(get_storage_hash_str(radix_key, None, page_size=self.page_size)) if len(radix_key) else ()
        )

    def radix_key(self, key: SessionKey, token_ids: array[int]) -> RadixKey:
        """The full pages of `token_ids` as the tree is asked for them."""
        radix_key = RadixKey(token_ids, key.extra_key, cache_salt=key.cache_salt)
        return radix_key.page_aligned(self.page_size)

    def match_tokens(self, key: SessionKey, token_ids: array[int]) -> int:
        """How many leading tokens are on the device now."""
        match = self._match_tree(MatchPrefixParams(key=self.radix_key(key, token_ids)))
        return int(match.device_prefix_len)

    def lock_path(self, key: SessionKey, token_ids: array[int]) -> DevicePath:
        """Find the session's leading pages on the device and keep them there."""
        match = self._match_tree(MatchPrefixParams(key=self.radix_key(key, token_ids)))
        node = match.last_device_node
        root = self.root_node_handle(key.extra_key)
        indices = self.tree_core.collect_full_device_indices(node, root)
        return DevicePath(node, match.device_prefix_len, indices, self.inc_lock_ref(node).to_dec_params())

    def unlock_path(self, path: DevicePath) -> None:
        """Let the pages go."""
        self.dec_lock_ref(path.node, path.receipt)

    def free_tail(self, key: SessionKey, token_ids: array[int], keep_tokens: int) -> int:
        """Free the device pages of `token_ids` beyond `keep_tokens` that nobody else has or uses; returns the
        tokens.

        Node by node from the end: a node with children is shared, a locked one is in use, and what lies
        before either is so too.
        """
        radix_key = self.radix_key(key, token_ids)
        keep_tokens = keep_tokens // self.page_size * self.page_size
        if 0 < keep_tokens < len(radix_key):
            self._match_tree(
                MatchPrefixParams(key=radix_key[:keep_tokens])
            )  # a match splits the node at its end
        match = self._match_tree(MatchPrefixParams(key=radix_key))
        freed = 0
        for node in reversed(self._path(match.last_device_node)):
            info = self._info(node)  # asked anew: a child that was freed is no child any more
            if info.path_start < keep_tokens or info.num_children or self._locked(node):
                break
            freed += self._free_leaf(node)
        return freed

    def _path(self, node: int) -> list[int]:
        """Node ids from below the root to `node`."""
        (path,) = self.tree_core.collect_path_info([node])
        return [entry.node_id for entry in path]

    def _info(self, node: int) -> Any:
        (path,) = self.tree_core.collect_path_info([node])
        return path[-1]

    def _locked(self, node: int) -> bool:
        """A lock taken on top of another one protects nothing new; that is how an existing lock shows."""
        before = self.protected_size()
        receipt = self.inc_lock_ref(node).to_dec_params()
        locked = bool(self.protected_size() == before)
        self.dec_lock_ref(node, receipt)
        return locked

    def _free_leaf(self, node: int) -> int:
        tracker = dict.fromkeys(self.tree_components, 0)
        backup = self._evict_device_leaf(node, tracker)
        assert backup is None, "the tree is not in write-back mode"
        return int(tracker[BASE_COMPONENT_TYPE])
