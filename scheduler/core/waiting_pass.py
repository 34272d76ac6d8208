"""Admits waiting requests, in the order of the policy, while slots, budget and blocks last.

No request overtakes a head of the queue that does not fit. Only requests that wait for something
outside the scheduler, or for other long prefills, are passed over.
"""

from collections import Counter
from dataclasses import dataclass

from scheduler.core.batch import StepBatch
from scheduler.core.kv_cache import PrefixHit
from scheduler.core.long_prefills import may_serve_held, outranks_long_prefills
from scheduler.core.plan import (
    Admission,
    PassedOver,
    RequestStatus,
    RowRequest,
    WaitReason,
)
from scheduler.core.queues import WaitingQueue
from scheduler.core.request import Request
from scheduler.core.state import SchedulerState

_DISPLACING_REASONS = frozenset(
    {WaitReason.SEQUENCE_SLOTS, WaitReason.BLOCKS, WaitReason.WATERMARK}
)


@dataclass(frozen=True, slots=True)
class Fit:
    """The tokens and cached blocks that a waiting request gets if it is admitted now."""

    hit: PrefixHit
    num_new_tokens: int
    num_drafts: int  # placeholders that pad the batch
    is_long: bool


class WaitingPass:
    """The second half of a step."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        config = state.config
        self._config = config
        self._policy = state.policy
        self._num_watermark_blocks = int(config.watermark * config.num_gpu_blocks)

    def run(self, batch: StepBatch) -> None:
        """Schedule waiting requests into the batch."""
        queues = self._state.queues
        if not queues:
            self._state.is_saturated &= batch.is_deferring_prefills
            return
        batch.end_running_pass()
        skipped: list[Request] = []
        while (
            queue := queues.next_queue(with_held=may_serve_held(self._state, batch.long_budget))
        ) is not None:
            full = self._full(batch)
            request = queue.first().item
            if full is not None and not self._policy.displaces:
                self._pass_over(batch, request, full)
                break
            reason = self._not_ready(request)
            if reason is not None:
                skipped.append(queue.pop())
                self._pass_over(batch, request, reason)
                continue
            if not self._admit_or_pass_over(batch, request, queue, full):
                break
        else:
            self._note_held(batch)
        if not batch.is_deferring_prefills:
            self._state.is_saturated = len(queues.waiting) > 0
        queues.put_back(skipped)
        batch.num_behind_head = len(queues) - len(batch.passed_over)

    def admit_none(self, batch: StepBatch, reason: WaitReason) -> None:
        """Admit no request in this step."""
        queues = self._state.queues
        if (queue := queues.next_queue()) is not None:
            self._pass_over(batch, queue.first().item, reason)
            batch.num_behind_head = len(queues) - 1

    def _note_held(self, batch: StepBatch) -> None:
        """Note that the head of `held` waits for long prefills, unless the step has noted one."""
        held, reason = self._state.queues.held, WaitReason.LONG_PREFILLS
        if held and all(fact.reason is not reason for fact in batch.passed_over):
            self._pass_over(batch, held.first().item, reason)

    def _full(self, batch: StepBatch) -> WaitReason | None:
        """Why no request can be admitted, if so."""
        if batch.budget <= 0:
            return WaitReason.BUDGET
        if self._state.table.num_running >= self._config.max_num_seqs:
            return WaitReason.SEQUENCE_SLOTS
        return None

    def _admit_or_pass_over(
        self, batch: StepBatch, request: Request, queue: WaitingQueue, full: WaitReason | None
    ) -> bool:
        """Admit the head of a queue if it fits.

        Returns:
            Whether to go on with the next request. A request that waits only for other long
            prefills does not block the requests behind it.
        """
        if any(victim.key == request.key for victim in batch.victims):
            # A request that was displaced in this step is not admitted in the same step, or two
            # requests would displace each other in turn.
            full = WaitReason.PREEMPTION
        fit = self._fit(batch, request) if full is None else _passed_over(request, full)
        if isinstance(fit, Fit):
            queue.pop()
            self._admit(batch, request, fit)
            return True
        if self._policy.displaces and self._displace_for(batch, request, fit):
            return True
        self._note(batch, request, fit)
        if fit.reason is WaitReason.LONG_PREFILLS:
            self._state.queues.hold(queue.pop())
            return True
        return False

    def _displace_for(self, batch: StepBatch, request: Request, lack: PassedOver) -> bool:
        """Preempt the policy's victim for a waiting request that may displace it.

        False when the policy forbids that, or when the blocks of all requests that may be displaced
        would not suffice.
        """
        state = self._state
        if not state.table.num_running:
            return False
        position = self._policy.victim_position(state.table)
        victim = state.table.request(int(state.table.running_rows[position]))
        if not self._policy.may_displace(request, victim):
            return False
        if self._is_read(victim.row):
            return False
        if not self._would_help(batch, request, lack, victim):
            return False
        state.displace(batch, position, request, lack.num_needed_blocks)
        return True

    def _is_read(self, row: int) -> bool:
        """Whether a request admitted in this step needs KV that `row` writes in this step."""
        num_refs = self._state.kv.pool.num_refs
        return any(num_refs(block_id) > 1 for block_id in self._state.kv.unwritten(row))

    def _would_help(
        self, batch: StepBatch, request: Request, lack: PassedOver, victim: Request
    ) -> bool:
        """Whether the request fits once the victim, and possibly further victims, are preempted."""
        if lack.reason is WaitReason.BUDGET:
            if batch.budget > 0 or not batch.has(victim.row):
                return False
        elif lack.reason not in _DISPLACING_REASONS:
            return False
        hit = self._state.kv.find_prefix(request)
        num_needed = self._state.kv.blocks_to_admit(len(request.token_ids), hit)
        num_needed = max(num_needed, lack.num_needed_blocks) + self._num_watermark_blocks
        return num_needed <= self._num_obtainable_blocks(request, hit)

    def _num_obtainable_blocks(self, request: Request, hit: PrefixHit) -> int:
        """Blocks that are free once every request that may be displaced has lost its own.

        The request's prefix hits do not count: while these blocks are referenced, the request needs
        no free blocks in their stead.
        """
        state = self._state
        hits = set(hit.block_ids)
        table = state.table
        held: Counter[int] = Counter()
        for row in table.running_rows.tolist():
            if self._policy.may_displace(request, table.request(row)):
                held.update(table.block_table[row, : table.num_blocks[row]].tolist())
        pool = state.kv.pool
        return pool.num_free + sum(
            pool.num_refs(block) == count for block, count in held.items() if block not in hits
        )

    def _not_ready(self, request: Request) -> WaitReason | None:
        """The event outside the scheduler that a request waits for, if any.

        A blocked request that became ready changes to WAITING here.
        """
        if request.is_waiting_for_output:
            return WaitReason.OUTPUT_IN_FLIGHT
        if not request.is_blocked:
            return None
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV and not request.is_ready:
            self._lease_blocks(request)
        if not request.is_ready:
            is_grammar = request.status is RequestStatus.WAITING_FOR_GRAMMAR
            return WaitReason.GRAMMAR if is_grammar else WaitReason.REMOTE_KV
        request.status = RequestStatus.WAITING
        return None

    def _lease_blocks(self, request: Request) -> None:
        """Lease blocks for what another worker has of the prompt, when there are enough.

        A request that got none in time computes its whole prompt.
        """
        state, remote = self._state, request.spec.remote_prefix
        if state.leases.of(request.key) is not None or remote is None:
            return
        if state.now >= remote.expires_at or not state.kv.is_looked_up(request):
            request.is_ready = True
            return
        num_reserved = self._num_watermark_blocks if state.table.num_running else 0
        state.leases.begin_import(request, num_reserved)

    def _fit(self, batch: StepBatch, request: Request) -> Fit | PassedOver:
        """The Fit of a request that can be admitted now, or why the request has to wait."""
        config = self._config
        hit = self._state.kv.find_prefix(request)
        num_tokens = len(request.token_ids)
        num_new = num_tokens - hit.num_tokens
        if batch.is_deferring_prefills and num_new > 1:
            return _passed_over(request, WaitReason.THROTTLED)
        num_drafts = 0
        if num_new == 1 and self._is_padded(batch):
            # Placeholder drafts keep the batch uniform, which the worker's CUDA graphs need.
            num_drafts = config.num_spec_tokens
            num_new += num_drafts
            if num_new > batch.budget or hit.num_tokens + num_new > config.max_model_len:
                return _passed_over(request, WaitReason.BUDGET)
        # Quirk of vLLM 0.27.1: a threshold below 1 + num_spec_tokens cuts the padded tokens, but
        # not num_drafts.
        is_long = 0 < config.long_prefill_token_threshold < num_new
        if is_long:
            num_new = min(config.long_prefill_token_threshold, batch.long_budget)
            if num_new <= 0:
                if not outranks_long_prefills(self._state, request):
                    return _passed_over(request, WaitReason.LONG_PREFILLS)
                # One token admits the request, which is served first from the next step on.
                num_new = 1
        # Without chunked prefill, a request longer than a whole budget would wait for ever, so such
        # a request is chunked nevertheless.
        is_whole = not config.enable_chunked_prefill and num_new <= config.max_num_batched_tokens
        if is_whole and num_new > batch.budget:
            return _passed_over(request, WaitReason.BUDGET)
        num_new = min(num_new, batch.budget)
        lack = self._lack_of_blocks(request, hit, num_new)
        return lack or Fit(hit, num_new, num_drafts, is_long)

    def _is_padded(self, batch: StepBatch) -> bool:
        """Whether drafts are used, and all rows scheduled so far are past their prefill."""
        if not self._config.num_spec_tokens:
            return False
        rows = batch.running_rows
        return len(rows) > 0 and not self._state.table.is_prefill_chunk[rows].any()

    def _lack_of_blocks(self, request: Request, hit: PrefixHit, num_new: int) -> PassedOver | None:
        """Why free blocks do not suffice for this step or for the whole request, if so."""
        kv = self._state.kv
        num_tokens = hit.num_tokens + num_new + kv.num_lookahead
        num_needed = kv.blocks_to_admit(num_tokens, hit)
        if self._config.reserve_full_sequence:
            num_needed = max(num_needed, kv.blocks_to_admit(len(request.token_ids), hit))
        # With no other request running there is no growth to reserve for, and the request must not
        # wait for ever.
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
        row = state.table.assign_row(request)
        batch.row_requests.append(
            RowRequest(row, request.key, request.request_id, token_ids, request.num_prompt_tokens)
        )
        state.table.num_computed[row] = num_cached
        block_ids = state.kv.admit(row, fit.hit, fit.num_new_tokens)
        state.leases.end_import_of(request.key)
        batch.grow([row] * len(block_ids), block_ids)
        batch.add(row, num_cached, fit.num_new_tokens, num_tokens, fit.num_drafts)
        if fit.is_long and self._config.long_prefill_share < 1:
            state.table.mark_long(row)
            batch.long_budget -= fit.num_new_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
        batch.admissions.append(Admission(request.key, request.request_id, num_cached, is_resumed))
        request.history.admitted(batch.step_id, batch.now, num_cached, is_resumed=is_resumed)
        if state.kv.is_looked_up(request):
            self._count(num_tokens, num_cached, is_resumed=is_resumed)

    def _count(self, num_tokens: int, num_hit_tokens: int, *, is_resumed: bool) -> None:
        stats = self._state.stats
        if is_resumed:
            stats.num_resumed_requests += 1
            stats.num_resumed_queried_tokens += num_tokens
            stats.num_resumed_hit_tokens += num_hit_tokens
        else:
            stats.num_requests += 1
            stats.num_queried_tokens += num_tokens
            stats.num_hit_tokens += num_hit_tokens

    def _pass_over(self, batch: StepBatch, request: Request, reason: WaitReason) -> None:
        self._note(batch, request, _passed_over(request, reason))

    @staticmethod
    def _note(batch: StepBatch, request: Request, fact: PassedOver) -> None:
        batch.passed_over.append(fact)
        request.history.passed_over(fact, batch.step_id, batch.now)


def _passed_over(request: Request, reason: WaitReason) -> PassedOver:
    return PassedOver(request.key, request.request_id, reason)
