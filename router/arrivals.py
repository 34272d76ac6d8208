"""What a scheduler's step brought, put where it belongs in each completion.

This is the router's hot path: it runs once a step for every completion that got tokens.
"""

from collections.abc import Callable, Mapping

from router.core.pauses import UnreadLimits
from router.core.placement import Pool
from router.request import Admission, Completion, Logprobs, StepNews


class Arrivals:
    """Reads the completions in flight, which the dispatcher owns, by handle."""

    def __init__(
        self,
        in_flight: Mapping[int, Completion],
        pool: Pool,
        unread: UnreadLimits,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self._in_flight = in_flight
        self._pool = pool
        self._unread = unread
        self._clock = clock
        self._wall_clock = wall_clock

    def take(self, news: StepNews) -> list[Completion]:
        """Append what came; returns the completions of which too much is unread.

        Handles of completions that the router ended itself are unknown, and skipped.
        """
        for admission in news.admissions:
            self._take_admission(admission)
        for logprobs in news.logprobs:
            self._take_logprobs(logprobs)
        self._take_drafts(news)
        return self._take_tokens(news)

    def _take_admission(self, admission: Admission) -> None:
        completion = self._in_flight.get(admission.handle)
        if completion is None or completion.is_admitted:
            return
        assert completion.sent is not None, "what is in flight was sent"
        completion.is_admitted = True
        self._pool.admitted(completion.sent, admission.num_cached_tokens)
        timeline = completion.request.timeline
        if timeline.admitted is None:
            # The scheduler's clock may differ from ours; never before arrival, never ahead.
            now = self._clock()
            ago = max(0.0, self._wall_clock() - admission.time_unix_s)
            timeline.admitted = max(timeline.arrived, now - ago)
            completion.num_cached_tokens = admission.num_cached_tokens

    def _take_logprobs(self, logprobs: Logprobs) -> None:
        completion = self._in_flight.get(logprobs.handle)
        if completion is not None:
            completion.logprobs.extend(logprobs.tokens)
            if logprobs.prompt_tokens:
                completion.prompt_logprobs = logprobs.prompt_tokens

    def _take_drafts(self, news: StepNews) -> None:
        """Count what speculation brought."""
        for handle, counts in zip(news.handles, news.draft_counts, strict=False):
            if (completion := self._in_flight.get(handle)) is not None:
                completion.request.num_draft_tokens += counts[0]
                completion.request.num_accepted_draft_tokens += counts[1]

    def _take_tokens(self, news: StepNews) -> list[Completion]:
        in_flight, token_ids, begin = self._in_flight, news.token_ids, 0
        unread: list[Completion] = []
        crowd = self._unread.crowd(len(in_flight))
        for handle, count in zip(news.handles, news.num_new_tokens, strict=True):
            end = begin + count
            completion = in_flight.get(handle)
            if completion is not None:
                completion.token_ids.extend(token_ids[begin:end])
                request = completion.request
                request.account.charge_output(count)
                if request.timeline.first_token is None:
                    request.timeline.first_token = self._clock()
                request.wake()
                num_unread = len(completion.token_ids) - completion.num_streamed
                if num_unread > completion.max_unread_tokens // crowd:
                    unread.append(completion)
            begin = end
        return unread
