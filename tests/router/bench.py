"""The router's state machine on a bench: fake links, a clock that the test moves, no sockets."""

from array import array

import numpy as np

from headrace.service.errors import ServiceError
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from headrace.vocabulary import FinishReason, WorkerState
from router.core.credit import WorkerReport
from router.core.placement import WorkerPool
from router.outputs import Admitted, CompletionFinish, StepOutputs
from router.request import Spec
from router.router import Router
from router.rules import Rules
from router.status_log import Identity, StatusLog
from tests.router.tiny_models import byte_level_model

TOKENIZER = byte_level_model().tokenizer


class Link:
    """Remembers what was sent."""

    def __init__(self, name="s"):
        self.name = name
        self.scheduler_id = name
        self.sent = {}
        self.paused = set()
        self.cancelled = []

    def submit(self, completion):
        """A greater epoch takes the place of the request's earlier one."""
        assert completion.handle not in self.sent
        for handle, earlier in list(self.sent.items()):
            if earlier.request_id == completion.request_id:
                assert earlier.epoch < completion.epoch
                self.drop(handle)
        self.sent[completion.handle] = completion

    def drop(self, handle):
        """Forget a completion; the router is not told."""
        del self.sent[handle]
        self.paused.discard(handle)

    def cancel(self, completion, finish):
        handle = completion.handle
        self.cancelled.append((handle, finish.reason))
        self.sent.pop(handle, None)
        self.paused.discard(handle)

    def release(self, handle):
        self.drop(handle)

    def set_paused(self, handle, *, is_paused):
        assert handle in self.sent
        (self.paused.add if is_paused else self.paused.remove)(handle)


class Bench:
    """A router, its link and its clock."""

    def __init__(self, *, waiting_allowance=2, max_num_seqs=4, **rules):
        self.time = 1000.0
        store = StatusStore("", Writer.ROUTER)
        self.router = Router(
            WorkerPool(waiting_allowance=waiting_allowance, max_report_age_s=1e9),
            Rules(**rules),
            StatusLog(store, Identity("r", "one"), encode=bytes, wall_clock=lambda: self.time),
            clock=lambda: self.time,
            wall_clock=lambda: self.time,
        )
        self.links = {}
        self.add("s", max_num_seqs=max_num_seqs)

    def add(self, name, max_num_seqs=4, **worker):
        link = self.links[name] = Link(name)
        self.router.live.on_connected(link)
        self.router.live.on_report(name, [report(name, max_num_seqs, **worker)], is_draining=False)
        return link

    def enter(self, request_id, num_tokens=10, *, tenant="", model="m", **fields):
        """Let a request in; returns what ends its caller's stay, and the request."""
        stay = self.router.reserve(request_id, tenant)
        reservation = stay.__enter__()
        spec = Spec(request_id=request_id, model=model, sampling=None, tenant=tenant, **fields)
        try:
            request = self.router.submit(
                reservation, spec, np.ones(num_tokens, np.int32), "", TOKENIZER
            )
        except ServiceError:
            stay.__exit__(None, None, None)
            raise
        return (lambda: stay.__exit__(None, None, None)), request

    def step(self, link="s", num_tokens=1, *, ends=(), handles=None):
        """The requests with these handles, or all that the link has, get tokens."""
        handles = list(self.links[link].sent) if handles is None else handles
        self.router.live.on_step(
            StepOutputs(
                handles=handles,
                num_new_tokens=[num_tokens] * len(handles),
                token_ids=array("i", [65] * (num_tokens * len(handles))),
                admissions=[Admitted(handle, 0, self.time) for handle in handles],
                finish_by_handle=dict.fromkeys(ends, CompletionFinish(FinishReason.LENGTH)),
            )
        )
        for handle in ends:
            del self.links[link].sent[handle]
            self.links[link].paused.discard(handle)

    def assert_empty(self):
        router = self.router
        assert (router.num_live, router.num_queued, router.num_in_flight) == (0, 0, 0)
        assert not router.live._requests
        assert not len(router.live._deadlines)
        assert not len(router._orphans)
        assert not router.num_paused
        assert (router._gate.permits.num_live, router._gate.num_reading) == (0, 0)
        assert router.pool.num_in_flight() == 0
        assert router._dispatcher.queue.load.num_tokens == 0
        assert router._dispatcher._restraint.num_streams == 0
        assert router.meters.num_accepted == sum(router.meters.num_ended.values())
        assert all(not link.sent for link in self.links.values())


def report(name, max_num_seqs, **changes):
    values = {
        "worker_id": f"w-{name}",
        "incarnation": "1",
        "model": "m",
        "state": WorkerState.READY,
        "max_model_len": 100_000,
        "block_size": 16,
        "num_kv_blocks": 100_000,
        "max_num_seqs": max_num_seqs,
        "vocab_size": 1000,
        "num_free_kv_blocks": 100_000,
        "num_running": 0,
        "num_waiting": 0,
    }
    return WorkerReport(**(values | changes))
