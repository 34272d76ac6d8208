"""A plan on its way to the worker, and what its result says of requests rather than rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from opentelemetry.trace import Span

from scheduler.core.plan import Int32Array, Int64Array, StepOutput, StepPlan
from scheduler.outbox import NO_DRAFTS
from scheduler.requests import LiveRequest
from scheduler.switchboard import Start, TokenDetails
from scheduler.worker import WorkerLostError, WorkerResult


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result has not come; keys is [num_reqs], in the plan's order.

    Rows change hands while results are on their way, so each plan remembers who had which.
    """

    plan: StepPlan
    keys: Int64Array
    started: tuple[Start, ...]
    span: Span | None

    def check(self, result: WorkerResult, num_spec_tokens: int) -> None:
        """WorkerLostError unless `result` answers this plan, with at most so many drafts each."""
        step = result.step
        if step.step_id != self.plan.step_id:
            raise WorkerLostError(
                f"it answered step {step.step_id} where {self.plan.step_id} was due"
            )
        if len(step.num_sampled_tokens) != self.plan.num_reqs:
            raise WorkerLostError(
                f"it answered for {len(step.num_sampled_tokens)} requests of {self.plan.num_reqs}"
            )
        num_drafts = step.num_draft_tokens
        if len(num_drafts) and (
            len(num_drafts) != self.plan.num_reqs or num_drafts.max() > num_spec_tokens
        ):
            raise WorkerLostError(f"it sent other drafts than {num_spec_tokens} for a request")

    def failures(self, result: WorkerResult) -> dict[int, str]:
        """What went wrong, by the key of the failed request."""
        if not result.message_by_failed_row:
            return {}
        key_by_row = self._key_by_row()
        return {key_by_row[row]: text for row, text in result.message_by_failed_row.items()}

    def draft_counts(self, result: WorkerResult, output: StepOutput) -> Int32Array:
        """Drafts verified and accepted for each of output.keys, [num_outputs, 2].

        [0, 2] when the plan had none. Those behind an end, though right, count as well.
        """
        if not len(self.plan.num_draft_tokens):
            return NO_DRAFTS
        # Both are in the plan's order; who got no tokens, or is gone, is not among the keys.
        is_kept = np.isin(self.keys, output.keys)
        num_drafts = self.plan.num_draft_tokens[is_kept]
        num_accepted = result.step.num_sampled_tokens[is_kept] - 1
        return np.stack((num_drafts, np.where(num_drafts > 0, num_accepted, 0)), axis=1)

    def token_details(
        self, result: WorkerResult, output: StepOutput, requests: Mapping[int, LiveRequest]
    ) -> list[TokenDetails]:
        """Log probabilities of the tokens that were kept; `requests` are the live ones by key.

        Those of the prompt come in pieces, chunk by chunk; they are gathered in the request until
        its first token.
        """
        if not result.logprobs:
            return []
        key_by_row = self._key_by_row()
        num_kept = dict(zip(output.keys.tolist(), output.num_new_tokens.tolist(), strict=True))
        details = []
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
            details.append(TokenDetails(request, entry.tokens[:num_tokens], prompt_tokens))
        return details

    def _key_by_row(self) -> dict[int, int]:
        return dict(zip(self.plan.rows.tolist(), self.keys.tolist(), strict=True))
