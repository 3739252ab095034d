"""Fleet: the workers that a router is joined to, their load as reported, and what we put on them.

A report says how a worker was a step ago; what was placed since is added here until the next one.
A worker that refused is full until a later report shows more room than the one that came with the
refusal, or nothing in use at all, or for `refused_s` at most: asking again each step would cost both
sides a message a step for nothing.
"""

from __future__ import annotations

import copy
import enum
import math
from dataclasses import dataclass, field, replace

from moonpool.core.protocol import RefuseReason
from moonpool.dispatch.config import DispatchConfig
from moonpool.ids import RequestId, WorkerKey
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.worker_view import WorkerFits, WorkerInfo, WorkerLoad, WorkerView

_NEVER = float("-inf")
_MAX_CHURN_WEIGHT = 1e100


class RoomNews(enum.Enum):
    """What a report of load means to those that wait."""

    #: Whoever found no place before finds none now.
    NONE = enum.auto()
    #: Who lacked blocks may find some.
    BLOCKS = enum.auto()
    #: The worker may be asked again, or no more.
    WORKERS = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    reason: RefuseReason
    ask_again_at: float
    #: The first report after the refusal (it comes in the same frame); None until then.
    load: WorkerLoad | None = None

    def is_over(self, load: WorkerLoad) -> bool:
        """Whether a report shows room that was not there at the refusal."""
        is_unused = load.num_available_blocks == load.num_total_blocks and not (
            load.num_requests or load.num_queued_tokens
        )
        if is_unused or self.reason is RefuseReason.DRAINING:
            return True
        if self.load is None:
            return False
        match self.reason:
            case RefuseReason.NO_BLOCKS:
                return load.num_available_blocks > self.load.num_available_blocks
            case RefuseReason.NO_SLOTS:
                return load.num_requests < self.load.num_requests
            case RefuseReason.QUEUE_FULL:
                return load.num_queued_tokens < self.load.num_queued_tokens
            case _:
                return True


@dataclass(slots=True, kw_only=True)
class _Worker:
    info: WorkerInfo
    #: Without fits: those of a report stay until another one has some.
    load: WorkerLoad = field(default_factory=WorkerLoad)
    fits: WorkerFits = field(default_factory=WorkerFits)
    refusal: _Refusal | None = None
    inhibited_until: float = _NEVER
    decoding: set[RequestId] = field(default_factory=set)
    #: Uncached tokens of each prefill that has not drawn its token.
    prefilling: dict[RequestId, int] = field(default_factory=dict)
    num_new_blocks: int = 0
    num_queued_tokens: int = 0
    #: Blocks that requests brought into its cache, recent ones counting more; see `fill`.
    churn: float = 0.0


class Fleet:
    """See the file's head."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._workers: dict[WorkerKey, _Worker] = {}
        self._table = FleetTable()
        #: Workers whose row in the table is not as it should be.
        self._changed: dict[WorkerKey, None] = {}
        #: What a block that is brought in now counts: grows e-fold while all pools are filled once.
        self._churn_weight = 1.0

    def __contains__(self, key: WorkerKey) -> bool:
        return key in self._workers

    def info(self, key: WorkerKey) -> WorkerInfo:
        return self._workers[key].info

    # -- what happens to workers --

    def join(self, info: WorkerInfo) -> None:
        """A worker is there, or has another role or address now."""
        self._changed[info.key] = None
        worker = self._workers.get(info.key)
        if worker is None:
            self._workers[info.key] = _Worker(info=info)
        else:
            worker.info = info

    def lose(self, key: WorkerKey) -> None:
        self._workers.pop(key, None)
        self._changed[key] = None

    def report(self, key: WorkerKey, load: WorkerLoad) -> RoomNews:
        """Note a worker's load."""
        worker = self._workers.get(key)
        if worker is None:
            return RoomNews.NONE
        self._changed[key] = None
        if load.fits is not None:
            worker.fits = load.fits
            load = replace(load, fits=None)
        before, was_refusing = worker.load, worker.refusal is not None
        num_gained_blocks = (
            load.num_available_blocks - before.num_available_blocks + worker.num_new_blocks
        )
        worker.load = load
        worker.num_new_blocks = 0
        if worker.refusal is not None:
            if worker.refusal.is_over(load):
                worker.refusal = None
            elif worker.refusal.load is None:
                worker.refusal = replace(worker.refusal, load=load)
        if not worker.info.role.computes:
            return RoomNews.NONE
        if (
            was_refusing != (worker.refusal is not None)
            # One that drains is not waited for: the prefill may come to be local.
            or load.is_draining != before.is_draining
            or load.num_total_blocks != before.num_total_blocks
        ):
            return RoomNews.WORKERS
        return RoomNews.BLOCKS if num_gained_blocks > 0 else RoomNews.NONE

    def refused(self, key: WorkerKey, reason: RefuseReason, now: float) -> None:
        """The worker has no room until a report shows some."""
        worker = self._workers.get(key)
        if worker is not None:
            self._changed[key] = None
            worker.refusal = _Refusal(reason=reason, ask_again_at=now + self._config.refused_s)

    def inhibit(self, key: WorkerKey, now: float) -> None:
        """A request path failed there: avoid it for a while."""
        worker = self._workers.get(key)
        if worker is not None:
            self._changed[key] = None
            worker.inhibited_until = now + self._config.inhibit_s

    def expire(self, now: float) -> bool:
        """Forget refusals and failures whose time is over; whether there were any."""
        has_expired = False
        for key, worker in self._workers.items():
            is_asked_again = worker.refusal is not None and worker.refusal.ask_again_at <= now
            is_trusted_again = _NEVER < worker.inhibited_until <= now
            if is_asked_again:
                worker.refusal = None
            if is_trusted_again:
                worker.inhibited_until = _NEVER
            if is_asked_again or is_trusted_again:
                has_expired = True
                self._changed[key] = None
        return has_expired

    # -- what we put on them --

    def begin_decode(self, key: WorkerKey, request_id: RequestId, num_blocks: int) -> None:
        worker = self._workers[key]
        assert request_id not in worker.decoding, (key, request_id)
        worker.decoding.add(request_id)
        self._changed[key] = None
        worker.num_new_blocks += num_blocks

    def begin_prefill(self, key: WorkerKey, request_id: RequestId, num_tokens: int) -> None:
        worker = self._workers[key]
        assert request_id not in worker.prefilling, (key, request_id)
        worker.prefilling[request_id] = num_tokens
        self._changed[key] = None
        worker.num_queued_tokens += num_tokens

    def fill(self, key: WorkerKey, num_blocks: int) -> None:
        """A request brings so many blocks into this worker's cache, which push others out.

        Kept so that equal choices can be spread: caches that are filled equally fast forget equally
        old blocks, as one pool would. Older ones count less, by how often all pools were filled since.
        """
        worker = self._workers[key]
        worker.churn += num_blocks * self._churn_weight
        self._changed[key] = None
        num_total_blocks = sum(
            other.load.num_total_blocks
            for other in self._workers.values()
            if other.info.role.computes
        )
        self._churn_weight *= math.exp(min(num_blocks / max(num_total_blocks, 1), 1.0))
        if self._churn_weight > _MAX_CHURN_WEIGHT:
            for other in self._workers.values():
                other.churn /= self._churn_weight
            self._changed.update(dict.fromkeys(self._workers))
            self._churn_weight = 1.0

    def end_decode(self, key: WorkerKey, request_id: RequestId) -> None:
        """May come twice, or after the worker is lost."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.decoding.discard(request_id)
            self._changed[key] = None

    def end_prefill(self, key: WorkerKey, request_id: RequestId) -> None:
        """May come twice, or after the worker is lost."""
        worker = self._workers.get(key)
        if worker is not None:
            self._changed[key] = None
            worker.num_queued_tokens -= worker.prefilling.pop(request_id, 0)

    # -- what the selector sees --

    def table(self) -> FleetTable:
        """All workers, as of now (`expire` before). The fleet's own: it changes with the fleet."""
        for key in self._changed:
            worker = self._workers.get(key)
            if worker is None:
                self._table.remove(key)
            else:
                self._table.put(_view(worker))
        self._changed.clear()
        return self._table

    def next_wakeup(self, now: float) -> float | None:
        """When a worker that is avoided now may be asked again, if no report says so before."""
        times = [worker.inhibited_until for worker in self._workers.values()]
        times += [w.refusal.ask_again_at for w in self._workers.values() if w.refusal is not None]
        return min((time for time in times if time > now), default=None)

    def fork(self) -> Fleet:
        fork = Fleet(self._config)
        for key, worker in self._workers.items():
            twin = copy.copy(worker)
            twin.decoding = set(worker.decoding)
            twin.prefilling = dict(worker.prefilling)
            fork._workers[key] = twin
        fork._changed = dict.fromkeys(fork._workers)
        fork._churn_weight = self._churn_weight
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for fleets that behave alike, exact times and how far churns lie apart, apart."""
        churns = sorted({worker.churn for worker in self._workers.values()})
        return tuple(
            sorted(
                (
                    key,
                    worker.info.role,
                    worker.load,
                    worker.refusal is not None,
                    worker.refusal.reason if worker.refusal else None,
                    worker.refusal.load if worker.refusal else None,
                    worker.inhibited_until == _NEVER,
                    tuple(sorted(worker.decoding)),
                    tuple(sorted(worker.prefilling.items())),
                    worker.num_new_blocks,
                    worker.fits,
                    churns.index(worker.churn),
                )
                for key, worker in self._workers.items()
            )
        )

    def validate(
        self,
        decoding: dict[WorkerKey, set[RequestId]],
        prefilling: dict[WorkerKey, set[RequestId]],
    ) -> None:
        """Check the books against who the dispatcher says is placed where (live workers only)."""
        for key, worker in self._workers.items():
            assert worker.decoding == decoding.get(key, set()), (key, worker, decoding)
            assert set(worker.prefilling) == prefilling.get(key, set()), (key, worker, prefilling)
            assert worker.num_queued_tokens == sum(worker.prefilling.values()), (key, worker)
            assert worker.num_new_blocks >= 0, (key, worker)
            assert 0.0 <= worker.churn < math.inf, (key, worker)


def _view(worker: _Worker) -> WorkerView:
    return WorkerView(
        info=worker.info,
        load=worker.load,
        fits=worker.fits,
        own_num_requests=len(worker.decoding),
        own_num_prefills=len(worker.prefilling.keys() - worker.decoding),
        own_num_new_blocks=worker.num_new_blocks,
        own_num_queued_tokens=worker.num_queued_tokens,
        is_inhibited=worker.inhibited_until > _NEVER,
        is_full=worker.refusal is not None,
        churn=worker.churn,
    )
