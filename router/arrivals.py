"""Applies a step's outputs to the completions.

This is the router's hot path: it runs once a step for every completion that got tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.core.placement import WorkerPool
from router.metrics import Meters
from router.outputs import Admitted, CompletionFinish, Logprobs, StepOutputs
from router.request import ClientCompletion


@dataclass(frozen=True, slots=True)
class Arrived:
    """What the dispatcher must act on: completions with too much unread, stop strings found."""

    unread: list[ClientCompletion] = field(default_factory=list)
    stop_by_handle: dict[int, str] = field(default_factory=dict)
    num_dropped_by_handle: dict[int, int] = field(default_factory=dict)  # tokens after a stop


class Arrivals:
    """Reads the completions in flight, which the dispatcher owns, by handle."""

    def __init__(
        self,
        in_flight: Mapping[int, ClientCompletion],
        pool: WorkerPool,
        meters: Meters,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self._in_flight = in_flight
        self._pool = pool
        self._meters = meters
        self._clock = clock
        self._wall_clock = wall_clock

    def take(self, outputs: StepOutputs, crowd: int) -> Arrived:
        """Append a step's tokens, up to a stop string, and what belongs to them.

        crowd divides the tokens that may be unread (see `pauses`).
        Handles of completions that the router ended itself are unknown, and skipped.
        """
        for admission in outputs.admissions:
            self._take_admission(admission)
        for logprobs in outputs.logprobs:
            self._take_logprobs(logprobs)
        arrived = self._take_tokens(outputs, crowd)
        if outputs.draft_counts:
            self._take_drafts(outputs, arrived.num_dropped_by_handle)
        return arrived

    def _take_admission(self, admission: Admitted) -> None:
        completion = self._in_flight.get(admission.handle)
        if completion is None or completion.is_admitted:
            return
        completion.is_admitted = True
        self._pool.admitted(completion.flight[1], admission.num_cached_tokens)
        request = completion.request
        timeline = request.timeline
        if timeline.admitted is None:
            # The scheduler's clock may differ: the time is kept between arrival and now.
            now = self._clock()
            ago = max(0.0, self._wall_clock() - admission.time_unix_s)
            timeline.admitted = max(timeline.arrived, now - ago)
            if not request.is_taken_up:
                completion.num_cached_tokens = admission.num_cached_tokens
            self._meters.admitted(request, admission.num_cached_tokens)

    def _take_logprobs(self, logprobs: Logprobs) -> None:
        completion = self._in_flight.get(logprobs.handle)
        if completion is not None:
            num_unwanted = min(len(logprobs.tokens), completion.num_unwanted_logprobs)
            completion.num_unwanted_logprobs -= num_unwanted
            completion.logprobs.extend(logprobs.tokens[num_unwanted:])
            completion.settle(self._clock())
            if logprobs.prompt_tokens:
                completion.prompt_logprobs = logprobs.prompt_tokens

    def _take_drafts(self, outputs: StepOutputs, num_dropped_by_handle: Mapping[int, int]) -> None:
        """Count what speculation brought.

        Dropped tokens were the last of their steps, so they are taken for accepted drafts. That is
        exact for the tokens of one step; of merged steps it may count too few, never too many.
        """
        for handle, (num_drafts, num_accepted) in zip(
            outputs.handles, outputs.draft_counts, strict=True
        ):
            if (completion := self._in_flight.get(handle)) is not None:
                num_kept = max(0, num_accepted - num_dropped_by_handle.get(handle, 0))
                completion.request.num_draft_tokens += num_drafts
                completion.request.num_accepted_draft_tokens += num_kept

    def _take_tokens(self, outputs: StepOutputs, crowd: int) -> Arrived:
        in_flight, token_ids, begin = self._in_flight, outputs.token_ids, 0
        arrived = Arrived()
        for handle, count in zip(outputs.handles, outputs.num_new_tokens, strict=True):
            end = begin + count
            completion = in_flight.get(handle)
            if completion is not None and completion.num_repeated:
                num_repeated = min(count, completion.num_repeated)
                completion.num_repeated -= num_repeated
                begin += num_repeated
            if completion is not None and begin < end:
                new_token_ids, num_new, stop = token_ids[begin:end], end - begin, None
                if completion.text.has_stops:
                    finish = outputs.finish_by_handle.get(handle)
                    new_token_ids, stop = _read(completion, new_token_ids, finish)
                    num_new = len(new_token_ids)
                completion.token_ids.extend(new_token_ids)
                request = completion.request
                request.account.charge_output(num_new)
                num_again = min(num_new, completion.num_regenerated)
                completion.num_regenerated -= num_again
                request.traffic.num_output_tokens += num_new - num_again
                if request.timeline.first_token is None:
                    request.timeline.first_token = self._clock()
                    self._meters.got_first_token(request)
                request.wake()
                num_unread = len(completion.token_ids) - completion.num_streamed
                if stop is not None:
                    del completion.logprobs[max(0, num_unread) :]
                    arrived.stop_by_handle[handle] = stop
                    arrived.num_dropped_by_handle[handle] = end - begin - num_new
                elif num_unread > completion.max_unread_tokens // crowd:
                    arrived.unread.append(completion)
            begin = end
        return arrived


def _read(
    completion: ClientCompletion, token_ids: Sequence[int], finish: CompletionFinish | None
) -> tuple[Sequence[int], str | None]:
    """Look for stop strings in a completion's new tokens; finish is set in its last step.

    Returns:
        The tokens that count, and the stop string that the last of them completed, if any.
    """
    spec, timed = completion.request.spec, completion.request.detokenizing
    num_hidden = 1 if finish is not None and spec.hides_last_token(finish) else 0
    read = partial(completion.text.read, token_ids[: len(token_ids) - num_hidden])
    num_tokens, stop = read() if timed is None else timed.timed(read)
    if stop is not None:
        return token_ids[:num_tokens], stop
    completion.text.skip(num_hidden)
    return token_ids, None
