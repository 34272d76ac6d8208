"""A plan without a result: validates the result and maps its rows to requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from headrace.service import telemetry
from scheduler.audit import OpenAudit
from scheduler.core.plan import Int32Array, Int64Array, StepOutput, StepPlan, StepResult
from scheduler.requests import FirstAdmission, LiveRequest, largest_id
from scheduler.step_feed import OpenStep
from scheduler.updates import NO_DRAFTS, NewLogprobs
from scheduler.worker import RowLogprobs, WorkerLostError, WorkerResult, WorkerSpec


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result has not come.

    Rows are reused while results are in flight, so each plan keeps which request had which row.

    Args:
        plan: what was sent.
        keys: [num_reqs] the requests' keys, in the plan's order.
        sent_s: when, on the event loop's clock.
        admissions: requests that the plan admitted for the first time.
        span: ends with the result; None when not traced.
        asking: requests that want log probabilities, by row.
        audit: answered with the result.
        step: what the step feed keeps of it; None if the worker only forgets rows.
    """

    plan: StepPlan
    keys: Int64Array
    sent_s: float = 0.0
    admissions: tuple[tuple[LiveRequest, FirstAdmission], ...] = ()
    span: Span | None = None
    asking: Mapping[int, LiveRequest] = field(default_factory=dict)
    audit: OpenAudit | None = None
    step: OpenStep | None = None

    def end_span(self, failure: str = "") -> None:
        """End the step's span, if it has one; failure: what became of the step."""
        if self.span is not None:
            if failure:
                telemetry.fail(self.span, "worker_lost", failure)
            self.span.end()

    def check(self, result: WorkerResult, info: WorkerSpec) -> None:
        """Compare every field of a worker's result with the plan, before any of it is applied.

        Raises:
            WorkerLostError: the result does not answer the plan; nothing of it can be trusted.
        """
        step = result.step
        if step.step_id != self.plan.step_id:
            raise WorkerLostError(
                f"it answered step {step.step_id} where {self.plan.step_id} was due"
            )
        if len(step.num_sampled_tokens) != self.plan.num_reqs:
            raise WorkerLostError(
                f"it answered for {len(step.num_sampled_tokens)} requests of {self.plan.num_reqs}"
            )
        if step.failed_rows and not set(step.failed_rows) <= set(self.plan.rows.tolist()):
            raise WorkerLostError(f"it named failed rows {step.failed_rows} that had no step")
        self._check_num_sampled(step)
        _check_ids(step.token_ids, info.vocab_size)
        self._check_drafts(step, info)
        self._check_logprobs(result, info.vocab_size)

    def _check_num_sampled(self, step: StepResult) -> None:
        """No token for unfinished prefills and failed rows; else one, and one per right draft."""
        plan = self.plan
        most = (~plan.is_prefill_chunk).astype(np.int32)
        least = most
        if len(plan.num_draft_tokens):
            most = np.where(plan.is_prefill_chunk, 0, 1 + plan.num_draft_tokens)
        if step.failed_rows:
            has_failed = np.isin(plan.rows, step.failed_rows)
            most, least = np.where(has_failed, 0, most), np.where(has_failed, 0, least)
        sampled = step.num_sampled_tokens
        if ((sampled < least) | (sampled > most)).any():
            raise WorkerLostError(
                f"it sampled {sampled.tolist()} tokens where {most.tolist()} were due"
            )

    def _check_drafts(self, step: StepResult, info: WorkerSpec) -> None:
        num_drafts = step.num_draft_tokens
        if len(num_drafts) and (
            len(num_drafts) != self.plan.num_reqs or largest_id(num_drafts) > info.num_spec_tokens
        ):
            raise WorkerLostError(f"it sent other drafts than {info.num_spec_tokens} for a request")
        _check_ids(step.draft_token_ids, info.vocab_size)

    def _check_logprobs(self, result: WorkerResult, vocab_size: int) -> None:
        """Rows that asked get one entry per token; other rows get none."""
        entries = {entry.row: entry for entry in result.logprobs}
        if len(entries) != len(result.logprobs) or not entries.keys() <= self.asking.keys():
            raise WorkerLostError("it sent log probabilities that no request asked for")
        if any(entry.largest_token_id >= vocab_size for entry in result.logprobs):
            raise WorkerLostError(f"it sent tokens that are not in its vocabulary of {vocab_size}")
        if not self.asking:
            return
        rows, sampled = self.plan.rows.tolist(), result.step.num_sampled_tokens.tolist()
        num_sampled = dict(zip(rows, sampled, strict=True))
        for row, request in self.asking.items():
            entry = entries.get(row, RowLogprobs(row, (), ()))
            if not _has_logprobs_due(request, entry, num_sampled[row]):
                raise WorkerLostError("it sent other log probabilities than were asked for")

    def failures(self, result: WorkerResult) -> dict[int, str]:
        """The worker's message about each failed request, by key."""
        if not result.message_by_failed_row:
            return {}
        key_by_row = self._key_by_row()
        return {key_by_row[row]: text for row, text in result.message_by_failed_row.items()}

    def draft_counts(self, output: StepOutput) -> Int32Array:
        """Drafts verified and accepted for each of output.keys, [num_outputs, 2].

        [0, 2] when the plan had none. An accepted draft is a kept token beyond the one that the
        step gives anyhow; a right draft behind the request's end is not kept.
        """
        if not len(self.plan.num_draft_tokens):
            return NO_DRAFTS
        # Both are in the plan's order; output.keys lacks requests that got no token or have ended.
        is_kept = np.isin(self.keys, output.keys)
        num_drafts = self.plan.num_draft_tokens[is_kept]
        num_accepted = output.num_new_tokens - 1
        return np.stack((num_drafts, np.where(num_drafts > 0, num_accepted, 0)), axis=1)

    def new_logprobs(
        self, result: WorkerResult, output: StepOutput, requests: Mapping[int, LiveRequest]
    ) -> list[NewLogprobs]:
        """Log probabilities of the tokens that were kept; `requests` are the live ones by key.

        Log probabilities of a prompt come chunk by chunk; the request collects them until its first
        token.
        """
        if not result.logprobs:
            return []
        key_by_row = self._key_by_row()
        num_kept = dict(zip(output.keys.tolist(), output.num_new_tokens.tolist(), strict=True))
        kept = []
        for entry in result.logprobs:
            request = requests.get(key_by_row[entry.row])
            if request is None:  # ended while the worker ran
                continue
            if not request.has_sent_prompt_logprobs:
                request.prompt_logprobs.extend(entry.prompt_tokens)
            if not (num_tokens := num_kept.get(request.key, 0)):
                continue
            prompt_tokens = tuple(request.prompt_logprobs)
            request.prompt_logprobs.clear()
            request.has_sent_prompt_logprobs = True
            kept.append(NewLogprobs(request, entry.tokens[:num_tokens], prompt_tokens))
        return kept

    def _key_by_row(self) -> dict[int, int]:
        return dict(zip(self.plan.rows.tolist(), self.keys.tolist(), strict=True))


def _has_logprobs_due(request: LiveRequest, entry: RowLogprobs, num_sampled: int) -> bool:
    """Whether a row has a log probability for each token that is due, and no other.

    Log probabilities of the prompt come chunk by chunk; the last ones come with the first token.
    """
    submission = request.submission
    if len(entry.tokens) != (num_sampled if submission.wants_logprobs else 0):
        return False
    num_prompt_due = len(submission.prompt_token_ids) - 1 if submission.wants_prompt_logprobs else 0
    if request.has_sent_prompt_logprobs:
        return len(entry.prompt_tokens) <= num_prompt_due
    num_prompt = len(request.prompt_logprobs) + len(entry.prompt_tokens)
    return num_prompt == num_prompt_due if num_sampled else num_prompt <= num_prompt_due


def _check_ids(token_ids: Int32Array, vocab_size: int) -> None:
    if len(token_ids) and largest_id(token_ids) >= vocab_size:
        raise WorkerLostError(f"it sent tokens that are not in its vocabulary of {vocab_size}")
