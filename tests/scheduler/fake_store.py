"""A status store without a server: keeps what the scheduler writes, and can claim and forget."""

from collections.abc import Iterable

import numpy as np

from headrace.status.records import JournalSource, OnSuperseded, Superseded, Tokens, Update
from headrace.status.states import State


class FakeStore:
    """Takes the journal when it is asked to, as the store's writer does in the background."""

    is_configured = True

    def __init__(self) -> None:
        self.source: JournalSource | None = None
        self.claimed_as = State.QUEUED
        self.updates: list[Update] = []
        self.epochs: dict[str, int] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[bytes]] = {}
        self.prompt_logprobs: dict[str, list[bytes]] = {}
        self.finals: dict[str, Update] = {}
        self.num_gaps = 0

    def record(self, update: Update) -> None:
        self.updates.append(update)

    def claim(self, request_id: str, state: State = State.QUEUED) -> int:
        """Raise the epoch, as a router does before it takes a request up or aborts it."""
        self.claimed_as = state
        self.epochs[request_id] = self.epochs.get(request_id, 1) + 1
        return self.epochs[request_id]

    def lose(self, request_id: str, num_tokens: int) -> None:
        """Forget all but the first tokens of a live request, as a replica that lagged behind."""
        if request_id not in self.finals:
            del self.token_ids.get(request_id, [])[num_tokens:]

    def write(self) -> int:
        """Take what is new; how many items that was."""
        items = self.source.take()
        superseded = [refused for item in items if (refused := self._apply(item)) is not None]
        if superseded:
            self.on_superseded(superseded)
        return len(items)

    def watch(self, on_superseded: OnSuperseded) -> None:
        self.on_superseded = on_superseded

    def write_all(self) -> None:
        while self.write():
            pass

    def _apply(self, item: Tokens | Update) -> Superseded | None:
        name = item.request_id
        if item.epoch < self.epochs.get(name, 0):
            return Superseded(name, item.epoch, self.claimed_as)
        self.epochs[name] = item.epoch
        final = self.finals.pop(name, None)
        assert final is None or final.epoch < item.epoch, "written after the end"
        if isinstance(item, Update):
            self.finals[name] = item
            return None
        have = self.token_ids.setdefault(name, [])
        if item.position > len(have):
            self.num_gaps += 1
            again = self.source.again(name, item.epoch, len(have))
            if again is None:
                return None
            assert again.position == len(have)
            item = again
        token_ids = np.frombuffer(item.token_ids, dtype="<i4").tolist()
        # A request that is computed again may have fewer tokens than before.
        overlap = have[item.position :][: len(token_ids)]
        assert overlap == token_ids[: len(overlap)], "other tokens at the same positions"
        have[item.position : item.position + len(token_ids)] = token_ids
        self._keep_logprobs(name, item, len(token_ids))
        return None

    def _keep_logprobs(self, name: str, item: Tokens, num_tokens: int) -> None:
        kept = self.logprobs.setdefault(name, [])
        if item.logprobs:
            assert len(item.logprobs) == num_tokens
            assert len(kept) == item.position, "log probabilities with a gap"
        kept += item.logprobs
        self.prompt_logprobs.setdefault(name, []).extend(item.prompt_logprobs)


def states_of(updates: Iterable[Update], request_id: str) -> list[str]:
    return [update.state.name for update in updates if update.request_id == request_id]
