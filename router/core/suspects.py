"""Which requests are held back after schedulers were lost with them, and which request to blame.

A request that kills its scheduler would be dispatched to the next scheduler, and the next. A lost
scheduler does not tell which of its requests was the cause, so each of them gets a loss, except
those that got TRIAL_TOKENS new tokens there. After one loss a request is dispatched again like any
other. After two losses the request is held back and then tried: while a group of requests is on
trial, the other suspects wait. A request passes its trial with TRIAL_TOKENS new tokens, or by
ending or being paused before that, and is no longer a suspect. Groups begin with one request and
double with each group that passes, so that many innocent requests soon run again. A scheduler that
is lost with requests on trial counts as a loss for those alone, and they are tried next, each by
itself. A request that is blamed alone, with MAX_LOSSES losses, is to blame.
"""

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice
from typing import Generic, TypeVar

MAX_LOSSES = 3
TRIAL_TOKENS = 16

T = TypeVar("T")


class Suspects(Generic[T]):
    """Losses by key, and the requests that are held back; the caller is the only writer."""

    def __init__(self) -> None:
        self._num_losses: dict[int, int] = {}
        self._held: OrderedDict[int, T] = OrderedDict()
        self._missing_tokens: dict[int, int] = {}  # of the requests on trial
        self._group_size = 1

    @property
    def num_held(self) -> int:
        """Requests that wait for their trial."""
        return len(self._held)

    @property
    def has_trial(self) -> bool:
        """Whether any request is on trial."""
        return bool(self._missing_tokens)

    def blame(self, keys: Collection[int]) -> int | None:
        """Count the loss of a scheduler that ran these requests; returns the request to blame."""
        on_trial = self._missing_tokens.keys() & keys
        blamed = on_trial or keys
        for key in blamed:
            self._num_losses[key] = self._num_losses.get(key, 0) + 1
            self._missing_tokens.pop(key, None)
        proven = [key for key in blamed if self._num_losses[key] >= MAX_LOSSES]
        return proven[0] if proven and len(blamed) == 1 else None

    def must_wait(self, key: int) -> bool:
        """Whether the request is to be held back rather than queued."""
        return self._num_losses.get(key, 0) > 1 and key not in self._missing_tokens

    def hold(self, key: int, item: T) -> None:
        """Keep a request back until `release` gives it out."""
        self._held[key] = item
        if self._num_losses[key] >= MAX_LOSSES:
            self._held.move_to_end(key, last=False)

    def release(self) -> list[T]:
        """The next group, which is on trial from now on; empty while another group is on trial."""
        if self._missing_tokens:
            return []
        if not self._held:
            self._group_size = 1
            return []
        group = list(islice(self._held, self._group_size))
        if self._num_losses[group[0]] >= MAX_LOSSES:
            self._group_size = 1
            del group[1:]
        self._missing_tokens = dict.fromkeys(group, TRIAL_TOKENS)
        return [self._held.pop(key) for key in group]

    def progressed(self, key: int, num_tokens: int) -> None:
        """A request got tokens; this matters only for a request on trial."""
        if key in self._missing_tokens:
            self._missing_tokens[key] -= num_tokens
            if self._missing_tokens[key] <= 0:
                self.clear(key)

    def clear(self, key: int) -> None:
        """Removes a request from the suspects: it passed its trial, was paused, or ended."""
        self._num_losses.pop(key, None)
        self._held.pop(key, None)
        if self._missing_tokens.pop(key, None) is not None and not self._missing_tokens:
            self._group_size *= 2
