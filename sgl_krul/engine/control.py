"""The scheduler's side of the verbs: a handler of control messages, and a short step in every round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from sgl_krul.engine.cache import KrulCache
from sgl_krul.engine.identity import Identity
from sgl_krul.engine.linker import KrulLinker
from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput, prompt_of
from sgl_krul.engine.page_source import DevicePageSource
from sgl_krul.engine.restore_job import EngineDevice
from sgl_krul.engine.write_through import device_pages
from sgl_krul.errors import KrulError, NotServed, SessionBusy
from sgl_krul.service import Reply, SessionService
from sgl_krul.service.wish import Wish
from sgl_krul.session.record import SessionKey, common_tokens, page_key
from sgl_krul.session.registry import Session, State

__all__ = ["SessionControl"]

logger = logging.getLogger(__name__)

_SLOW_STEP_S = 0.1
_IDLE_NAP_S = 0.005  # a message that comes meanwhile waits so long, when nothing else runs

Send = Callable[[KrulControlReqOutput, KrulControlReqInput], None]


class SessionControl:
    """Drives the service from the scheduler's thread: nothing here waits for I/O."""

    def __init__(
        self,
        service: SessionService,
        cache: KrulCache,
        linker: KrulLinker,
        identity: Identity,
        device: EngineDevice,
    ) -> None:
        self.service = service
        self._device = device
        service.resumes.plans.device = device
        self._identity = identity
        self._cache = cache
        self._linker = linker
        self._send: Send | None = None
        self._sources: dict[str, DevicePageSource] = {}
        self._verbs: dict[str, Callable[[SessionKey, str, Reply], None]] = {
            "pause": self._known(self._pause),
            "resume": self._resume,
            "hold": self._hold,
            "forget": self._known(self._forget),
            "move": self._known(self._move),
            "export": self._known(self._export),
            "import": self._import,
            "show": self._known(self._show),
            "plan": self._known(self._plan),
            "timeline": self._timeline,
            "calibrate": self._calibrate,
            "rates": self._rates,
            "list": self._list,
        }
        if service.ranks.size > 1:
            self._verbs |= dict.fromkeys(("move", "export", "import"), self._not_served)
        cache.on_finished = service.observe
        cache.on_first_token = service.resumes.first_token
        cache.on_step = self._step
        self._slow_steps = 0
        cache.on_reset = self._before_flush

    def connect(self, send: Send, others_run: Callable[[], bool], others_need: Callable[[], int]) -> None:
        """Where answers go, SGLang's channel to the front end; whether requests run or wait now, and how many
        device slots they may yet grow by.
        """
        self._send = send
        self.service.resumes.restores.others_run = others_run
        self._device.others_need = others_need

    def test_recompute(self) -> None:
        """Once, when all of the server is built."""
        self._device.test_recompute()

    def handle(self, message: KrulControlReqInput) -> None:
        """Begin one verb. The answer follows by `connect`'s channel, now or when the work is done.

        Whatever goes wrong is answered: an exception that left this handler would end the scheduler.
        """
        start = time.monotonic()

        def reply(result: dict[str, Any] | KrulError) -> None:
            assert self._send is not None
            self._send(_output(message.request_id, result), message)

        try:
            key = SessionKey(message.session_id, message.cache_salt, message.extra_key)
            self.service.agree_on(key)
            self._verbs[message.verb](key, message.argument, reply)
        except KrulError as error:
            reply(error)
        except Exception as error:
            logger.exception("krul: the verb %r failed", message.verb)
            reply(KrulError(f"internal error in {message.verb!r}: {error!r}; the server's log has the trace"))
        self._took(start)

    def _step(self) -> None:
        """Our part of the scheduler's round."""
        start = time.monotonic()
        self.service.poll()
        self._took(start)

    def _took(self, start: float) -> None:
        """Other chats waited for us so long."""
        self._slow_steps += time.monotonic() - start > _SLOW_STEP_S

    @property
    def working(self) -> bool:
        """True while workers of this process need the interpreter."""
        return self.service.working or self._linker.write_through.pending > 0

    @property
    def estimating(self) -> bool:
        """True while the estimator needs the interpreter. Nobody waits for it."""
        return self.service.estimates.working

    @property
    def computing(self) -> bool:
        """True while a restore has something to compute in the next round: no time to nap."""
        return self.service.computing

    def give_room(self) -> bool:
        """Running requests are out of slots: give back some of ours. False when there are none."""
        return self.service.resumes.give_room()

    @property
    def held_tokens(self) -> int:
        """Device slots that restores have reserved: of no request, and not in the tree."""
        return self._device.held_tokens

    @property
    def flushes(self) -> int:
        """How often the device was flushed."""
        return self._cache.epoch

    def nap(self) -> None:
        """Let the workers have the interpreter: an idle scheduler spins, and they would starve."""
        self.service.wait(_IDLE_NAP_S)

    def weights_changed(self, model: Path | None, weight_version: str | None, *, flushed: bool) -> None:
        """From now on pages belong to another namespace: that of `model`, or an unknown one.

        Until a flush the tree still holds the old weights' KV: nothing is stored so long.
        """
        for source in self._sources.values():
            source.revoke()
        if model is None:
            namespace = self._identity.of_unknown(weight_version)
        else:
            namespace = self._identity.of_model(model, weight_version)
        self._linker.namespace = namespace
        self._linker.suspended = not flushed
        self.service.change_namespace(namespace)
        logger.info("krul: weights changed, sessions are stored under namespace %s from now on", namespace)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all of them ask."""
        return not self.service.ranks.agree_min([not flag])[0]

    def _known(self, verb: Callable[[Session, SessionKey, str, Reply], None]) -> Any:
        """A verb for a session that this server knows, or that the shared tier tells it of."""

        def run(key: SessionKey, argument: str, reply: Reply) -> None:
            self.service.exchange.locate(key, lambda session: verb(session, key, argument, reply), reply)

        return run

    def _pause(self, session: Session, key: SessionKey, _argument: str, reply: Reply) -> None:
        if session.state in (State.PAUSED, State.STALE):
            freed = 0
            if session.token_ids:  # a resume may have put them on the device, and nothing has run since
                in_cache = session.key_in_cache(key)
                names = self._cache.page_hashes(in_cache, session.token_ids)
                freed = self._free_device(session, in_cache, names)
            told = {"already_paused": True, "device_tokens_freed": freed}
            reply(self.service.describe(session) | told)
            return
        if self._linker.suspended:
            raise SessionBusy(
                f"session {key.session_id!r} can't be paused: the weights were updated without flushing "
                f"the cache, so its KV is of the old ones. POST /flush_cache first."
            )
        in_cache = session.key_in_cache(key)
        hashes = self._cache.page_hashes(key, session.token_ids)
        names = hashes if in_cache == key else self._cache.page_hashes(in_cache, session.token_ids)
        path = self._cache.lock_path(in_cache, session.token_ids)
        source = DevicePageSource(
            self._linker.pages,
            self._linker.memory,
            [page_key(self._linker.namespace, name) for name in names],
            device_pages(path.indices, self._cache.page_size),
        )
        epoch = self._cache.epoch

        def settle(success: bool) -> int:
            self._sources.pop(session.digest, None)
            if self._cache.epoch != epoch:  # flushed meanwhile: the lock and the pages are gone
                return 0
            self._cache.unlock_path(path)
            return self._free_device(session, in_cache, names) if success else 0

        try:
            self.service.pause(
                session,
                hashes,
                source,
                before=self._linker.write_through.barrier,
                settle=settle,
                reply=reply,
                private_hashes=None if in_cache == key else names,
            )
        except KrulError:
            self._cache.unlock_path(path)
            raise
        self._sources[session.digest] = source

    def _resume(self, key: SessionKey, argument: str, reply: Reply) -> None:
        wish = Wish.read(argument)
        session = self.service.registry.find(key.digest)
        if session is not None and session.state is State.ACTIVE:
            reply(self.service.describe(session) | {"reason": "the session is active: nothing to bring back"})
        elif session is not None:
            self.service.resume(key, hold=False, reply=reply, wish=wish)
        else:
            self.service.exchange.locate(
                key, lambda _: self.service.resume(key, hold=False, reply=reply, wish=wish), reply
            )

    def _hold(self, key: SessionKey, argument: str, reply: Reply) -> None:
        """A request waits: restore if there is something to restore, else let it go at once.

        Of a session that is not known here, another server may have paused it into the shared tier.
        """
        session = self.service.registry.find(key.digest)
        shared = self.service.store.shared is not None
        if session is None and not shared:
            reply({"session_id": key.session_id, "state": "unknown"})
        elif session is not None and session.state is not State.PAUSED:
            told = {"state": session.state.value, "lossy_since": session.private}
            reply({"session_id": key.session_id} | told)
        else:
            self.service.resume(key, hold=True, reply=reply, wish=Wish(prompt=prompt_of(argument)))

    def _move(self, session: Session, _key: SessionKey, argument: str, reply: Reply) -> None:
        self.service.exchange.move(session, argument, reply)

    def _export(self, session: Session, _key: SessionKey, argument: str, reply: Reply) -> None:
        self.service.exchange.export(session, Path(argument), reply)

    def _import(self, _key: SessionKey, argument: str, reply: Reply) -> None:
        self.service.exchange.take_in(Path(argument), reply)

    def _not_served(self, _key: SessionKey, _argument: str, _reply: Reply) -> None:
        raise NotServed(
            "moving, exporting and importing sessions is not served with --tp-size "
            f"{self.service.ranks.size}: each rank stores its own heads. Run it on one GPU, or pause and "
            "resume only."
        )

    def _forget(self, session: Session, key: SessionKey, _argument: str, reply: Reply) -> None:
        in_cache = session.key_in_cache(key)
        all_tokens = [session.token_ids, *session.branches]
        own = [(ids, self._cache.page_hashes(key, ids)) for ids in all_tokens]
        alone = [] if in_cache == key else [self._cache.page_hashes(in_cache, ids) for ids in all_tokens]
        names = alone[0] if alone else own[0][1]
        others = [
            other.token_ids
            for other in self.service.registry
            if other is not session and other.key is not None and other.key[1:] == key[1:]
        ]

        def drop() -> None:
            self._linker.write_through.barrier()
            for token_ids, page_hashes in own:
                shared = max((common_tokens(token_ids, ids) for ids in others), default=0)
                for page_hash in page_hashes[shared // self._cache.page_size :]:
                    self._linker.memory.delete(page_key(self._linker.namespace, page_hash))
            for page_hash in chain.from_iterable(alone):  # nobody else has these
                self._linker.memory.delete(page_key(self._linker.namespace, page_hash))

        self.service.forget(
            session, settle=lambda: self._free_device(session, in_cache, names), drop=drop, reply=reply
        )

    def _show(self, session: Session, _key: SessionKey, _argument: str, reply: Reply) -> None:
        reply(self.service.describe(session))

    def _plan(self, session: Session, key: SessionKey, _argument: str, reply: Reply) -> None:
        self.service.resumes.explain(session, key, reply)

    def _timeline(self, key: SessionKey, _argument: str, reply: Reply) -> None:
        reply(self.service.resumes.plans.timeline(key))

    def _calibrate(self, _key: SessionKey, _argument: str, reply: Reply) -> None:
        self.service.calibration.begin(reply)

    def _rates(self, _key: SessionKey, _argument: str, reply: Reply) -> None:
        reply(self.service.resumes.plans.rates())

    def _list(self, _key: SessionKey, _argument: str, reply: Reply) -> None:
        load = {
            "layer_takeovers": self._linker.layer_done_counter.takeovers,
            "slow_steps": self._slow_steps,
            "recompute": self.service.resumes.plans.recompute,
            "problems": self._problems(),
        }
        self.service.exchange.refresh(reply, lambda: self.service.overview() | {"load": load})

    def _problems(self) -> list[str]:
        """What is not as it should be, of all that can be looked at without waiting; empty when sound."""
        if self.service.working:
            return []
        checks = (self.service.registry.check, self.service.resumes.check, self._device.check)
        return [problem for check in checks for problem in check()]

    def _free_device(self, session: Session, key: SessionKey, hashes: tuple[str, ...]) -> int:
        """Free the session's own device pages: older branches first, so their trunk is a leaf afterwards.

        `key` is the one they have there, `hashes` their names under it.
        """
        self._cache.drain_offloads()
        (unshared,) = self.service.ranks.agree_min([-self._shared_pages(session, hashes)])
        keep = -unshared * self._cache.page_size
        freed = sum(self._cache.free_tail(key, branch, keep) for branch in session.branches)
        return freed + self._cache.free_tail(key, session.token_ids, keep)

    def _shared_pages(self, session: Session, hashes: tuple[str, ...]) -> int:
        """Leading pages that are all another active session has: the tree doesn't show that it needs them.

        (Where another goes on differently, the tree has a node with children, and keeps that by itself.)
        """
        ends = self.service.registry.ends(but=session)
        return max((index + 1 for index, page_hash in enumerate(hashes) if page_hash in ends), default=0)

    def _before_flush(self) -> None:
        self.service.resumes.cancel_all("the device was flushed")
        for source in self._sources.values():
            source.revoke()


def _output(request_id: str, result: dict[str, Any] | KrulError) -> KrulControlReqOutput:
    if isinstance(result, KrulError):
        body = {"type": type(result).__name__, "message": str(result)}
        return KrulControlReqOutput(request_id=request_id, status=result.status, body=body)
    return KrulControlReqOutput(request_id=request_id, status=200, body=result)
