"""Admits waiting requests, in the order of the policy, while slots, budget and blocks last.

Nobody overtakes a head that does not fit; only requests that wait on something else are set aside.
"""

from dataclasses import dataclass, replace

from scheduler.core.batch import StepBatch
from scheduler.core.kv_cache import PrefixHit
from scheduler.core.plan import (
    Admission,
    PassedOver,
    PrefixCacheStats,
    RequestStatus,
    RowRequest,
    WaitReason,
)
from scheduler.core.request import Request
from scheduler.core.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Fit:
    """How a waiting request would start."""

    hit: PrefixHit
    num_new_tokens: int
    num_drafts: int


class WaitingPass:
    """The second half of a step."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        config = state.config
        self._config = config
        self._num_watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        # Whether requests were left over when nothing held admissions back.
        self.is_saturated = False
        self._stats = PrefixCacheStats()

    def run(self, batch: StepBatch) -> None:
        """Schedule waiting requests into the batch."""
        queues = self._state.queues
        batch.end_running_pass()
        set_aside: list[Request] = []
        while queues and batch.budget > 0:
            if self._state.table.num_running >= self._config.max_num_seqs:
                self._pass_over(batch, queues.next_queue().head(), WaitReason.SEQUENCE_SLOTS)
                break
            queue = queues.next_queue()
            request = queue.head()
            reason = self._not_ready(request)
            if reason is not None:
                set_aside.append(queue.pop())
                self._pass_over(batch, request, reason)
                continue
            fit = self._fit(batch, request)
            if isinstance(fit, PassedOver):
                batch.passed_over.append(fit)
                break
            queue.pop()
            self._admit(batch, request, fit)
        if not batch.is_deferring_prefills:
            self.is_saturated = len(queues.waiting) > 0
        batch.num_behind_head = len(queues) - (len(batch.passed_over) - len(set_aside))
        queues.put_back(set_aside)

    def _not_ready(self, request: Request) -> WaitReason | None:
        """Why a request holds nobody up, or None; one that became ready is WAITING from here on."""
        if request.is_waiting_for_output:
            return WaitReason.OUTPUT_IN_FLIGHT
        if not request.is_blocked:
            return None
        if not request.is_ready:
            is_grammar = request.status is RequestStatus.WAITING_FOR_GRAMMAR
            return WaitReason.GRAMMAR if is_grammar else WaitReason.REMOTE_KV
        request.status = RequestStatus.WAITING
        return None

    def _fit(self, batch: StepBatch, request: Request) -> Fit | PassedOver:
        """What a request would get now, or why it has to wait."""
        config = self._config
        hit = self._state.kv.find_prefix(request)
        num_tokens = len(request.token_ids)
        num_new = num_tokens - hit.num_tokens
        if batch.is_deferring_prefills and num_new > 1:
            return _passed_over(request, WaitReason.THROTTLED)
        num_drafts = 0
        if num_new == 1 and self._is_padded(batch):
            # The batch stays uniform, which the worker's graphs need.
            num_drafts = config.num_spec_tokens
            num_new += num_drafts
            if num_new > batch.budget or hit.num_tokens + num_new > config.max_model_len:
                return _passed_over(request, WaitReason.BUDGET)
        if 0 < config.long_prefill_token_threshold < num_new:
            num_new = config.long_prefill_token_threshold
        if not config.enable_chunked_prefill and num_new > batch.budget:
            return _passed_over(request, WaitReason.BUDGET)
        num_new = min(num_new, batch.budget)
        return self._lack_of_blocks(request, hit, num_new) or Fit(hit, num_new, num_drafts)

    def _is_padded(self, batch: StepBatch) -> bool:
        """Whether every running request scheduled so far is past its prefill, and drafts."""
        if not self._config.num_spec_tokens:
            return False
        rows = batch.running_rows
        return len(rows) > 0 and not self._state.table.is_prefill_chunk[rows].any()

    def _lack_of_blocks(self, request: Request, hit: PrefixHit, num_new: int) -> PassedOver | None:
        """Why blocks do not suffice, if they do not: for this step, or for the whole request."""
        kv = self._state.kv
        num_tokens = hit.num_tokens + num_new + kv.num_lookahead
        num_needed = kv.blocks_to_admit(num_tokens, hit)
        if self._config.reserve_full_sequence:
            num_needed = max(num_needed, kv.blocks_to_admit(len(request.token_ids), hit))
        # Alone, a request needs no reserve for others' growth: no deadlock.
        num_reserved = self._num_watermark_blocks if self._state.table.num_running else 0
        num_free = kv.pool.num_free
        if num_needed + num_reserved <= num_free:
            return None
        reason = WaitReason.BLOCKS if num_needed > num_free else WaitReason.WATERMARK
        return PassedOver(request.key, request.request_id, reason, num_needed, num_free)

    def _admit(self, batch: StepBatch, request: Request, fit: Fit) -> None:
        state = self._state
        is_resumed = request.status is RequestStatus.PREEMPTED
        num_tokens = len(request.token_ids)
        num_cached = fit.hit.num_tokens
        token_ids = request.token_ids
        row = state.table.place(request)
        batch.row_requests.append(
            RowRequest(row, request.key, request.request_id, token_ids, request.num_prompt_tokens)
        )
        state.table.num_computed[row] = num_cached
        batch.grow(row, state.kv.admit(row, fit.hit, fit.num_new_tokens))
        num_drafts = min(fit.num_drafts, max(num_cached + fit.num_new_tokens - num_tokens, 0))
        batch.add(row, num_cached, fit.num_new_tokens, num_tokens, num_drafts)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
        batch.admissions.append(Admission(request.key, request.request_id, num_cached, is_resumed))
        if state.kv.is_looked_up(request):
            self._count(num_tokens, num_cached, is_resumed=is_resumed)

    def take_stats(self) -> PrefixCacheStats:
        """Prefix-cache statistics of the admissions since the last call."""
        taken, self._stats = self._stats, PrefixCacheStats()
        return taken

    def _count(self, num_tokens: int, num_hit_tokens: int, *, is_resumed: bool) -> None:
        stats = self._stats
        if is_resumed:
            self._stats = replace(
                stats,
                num_resumed_requests=stats.num_resumed_requests + 1,
                num_resumed_queried_tokens=stats.num_resumed_queried_tokens + num_tokens,
                num_resumed_hit_tokens=stats.num_resumed_hit_tokens + num_hit_tokens,
            )
        else:
            self._stats = replace(
                stats,
                num_requests=stats.num_requests + 1,
                num_queried_tokens=stats.num_queried_tokens + num_tokens,
                num_hit_tokens=stats.num_hit_tokens + num_hit_tokens,
            )

    @staticmethod
    def _pass_over(batch: StepBatch, request: Request, reason: WaitReason) -> None:
        batch.passed_over.append(_passed_over(request, reason))


def _passed_over(request: Request, reason: WaitReason) -> PassedOver:
    return PassedOver(request.key, request.request_id, reason)
