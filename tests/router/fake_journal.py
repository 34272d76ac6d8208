"""What a fake scheduler writes into a real store: tokens, and how completions end."""

import time
from array import array
from dataclasses import replace

from headrace.status.records import Tokens, Update
from headrace.status.states import State
from headrace.v1 import common_pb2

_STATE_BY_REASON = {
    common_pb2.FINISH_REASON_STOP: State.STOPPED,
    common_pb2.FINISH_REASON_LENGTH: State.LENGTH_CAPPED,
    common_pb2.FINISH_REASON_ABORTED: State.ABORTED,
    common_pb2.FINISH_REASON_ERROR: State.ERROR,
}


class FakeJournal:
    """The source of a scheduler's store; `is_held` keeps everything back."""

    def __init__(self, name, incarnation="one"):
        self.name = name
        self.incarnation = incarnation
        self.is_held = False
        self._items = []
        self._whole = {}  # by completion and epoch, every token known here
        self._running = set()

    def add(self, generation, position, token_ids, logprobs=(), prompt_logprobs=()):
        """Tokens of a completion, from a position on."""
        key = generation.submission.request_id, generation.submission.epoch
        if key not in self._running:
            self._running.add(key)
            self._update(generation, State.RUNNING)
        piece = Tokens(
            request_id=key[0],
            epoch=key[1],
            create_time_unix_s=generation.submission.arrival_time_unix_s,
            position=position,
            token_ids=array("i", token_ids).tobytes(),
            logprobs=[entry.SerializeToString() for entry in logprobs],
            prompt_logprobs=[entry.SerializeToString() for entry in prompt_logprobs],
        )
        if key not in self._whole:
            known = generation.generated_token_ids[:position]
            self._whole[key] = replace(
                piece, position=0, token_ids=array("i", known).tobytes(), logprobs=()
            )
        whole = self._whole[key]
        self._whole[key] = replace(
            whole,
            token_ids=whole.token_ids + piece.token_ids,
            logprobs=[*whole.logprobs, *piece.logprobs],
        )
        self._items.append(piece)

    def end(self, generation, reason, stop_token_id=None):
        """The end of a completion."""
        self._update(
            generation,
            _STATE_BY_REASON[reason],
            completion_tokens=generation.position,
            stop_token_id=stop_token_id,
        )

    def _update(self, generation, state, **fields):
        submission = generation.submission
        self._items.append(
            Update(
                request_id=submission.request_id,
                state=state,
                epoch=submission.epoch,
                time_unix_s=time.time(),
                create_time_unix_s=submission.arrival_time_unix_s,
                scheduler_id=self.name,
                scheduler_incarnation=self.incarnation,
                worker_id=submission.worker_id,
                **fields,
            )
        )

    def take(self):
        if self.is_held:
            return []
        items, self._items = self._items, []
        return items

    def again(self, request_id, epoch, position):
        whole = self._whole.get((request_id, epoch))
        if whole is None:
            return None
        num_tokens, num_logprobs = len(whole.token_ids) // 4, len(whole.logprobs)
        if num_logprobs and num_logprobs < num_tokens - position:
            return None
        logprobs = whole.logprobs[num_logprobs - (num_tokens - position) :]
        return replace(
            whole,
            position=position,
            token_ids=whole.token_ids[4 * position :],
            logprobs=logprobs if num_logprobs else (),
        )
