"""What is queued for the store: items by completion, in order, merged if only the last counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from headrace.status.records import Tokens, Update
from headrace.status.states import State

Item = Tokens | Update


@dataclass(slots=True)
class Chain:
    """Items of one completion, oldest first; since is when the first was queued.

    early_since: when the first item was found to be early. is_repeated: written before, and queued
    again in case the store has lost it.
    """

    since: float
    items: list[Item] = field(default_factory=list)
    num_bytes: int = 0
    early_since: float | None = None
    is_repeated: bool = False


class ChainQueue:
    """Chains by the names of their completions, bounded in number and in bytes."""

    def __init__(self, *, max_completions: int, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_completions = max_completions
        self._max_bytes = max_bytes
        self._clock = clock
        self._chains: dict[str, Chain] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def lag_s(self) -> float:
        """How long the first chain has waited; 0 when there is none."""
        first = next(iter(self._chains.values()), None)
        return 0.0 if first is None else self._clock() - first.since

    def put(self, item: Item) -> bool:
        """Queues an item; false: there is no room. A spec without room is left out."""
        chain = self._chains.get(item.request_id)
        num_bytes = num_bytes_of(item)
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            if not isinstance(item, Update):
                return False
            # Without the spec, the request can be looked up but not be taken up again.
            item, num_bytes = replace(item, spec=None), 0
        if chain is None:
            if len(self._chains) >= self._max_completions:
                return False
            chain = self._chains[item.request_id] = Chain(self._clock())
        _append(chain.items, item)
        chain.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return True

    def take(self, max_completions: int, max_bytes: int) -> dict[str, Chain]:
        """Removes the oldest chains and returns them; one of them may exceed max_bytes."""
        taken: dict[str, Chain] = {}
        num_bytes = 0
        for name, chain in self._chains.items():
            if len(taken) == max_completions or (taken and num_bytes > max_bytes):
                break
            taken[name] = chain
            num_bytes += chain.num_bytes
        for name in taken:
            del self._chains[name]
        self.num_bytes -= num_bytes
        return taken

    def put_back(self, chains: Mapping[str, Chain]) -> None:
        """Queues chains again, ahead of items of their completions that were queued since."""
        for name, chain in chains.items():
            self.num_bytes += chain.num_bytes
            newer = self._chains.get(name)
            if newer is not None:
                for item in newer.items:
                    _append(chain.items, item)
                chain.num_bytes += newer.num_bytes
            self._chains[name] = chain

    def clear(self) -> None:
        self._chains.clear()
        self.num_bytes = 0


def num_bytes_of(item: Item) -> int:
    """About what an item occupies beyond a fixed size."""
    if isinstance(item, Update):
        return len(item.spec or b"")
    num_bytes = len(item.token_ids)
    if item.logprobs or item.prompt_logprobs:
        num_bytes += sum(map(len, item.logprobs)) + sum(map(len, item.prompt_logprobs))
    return num_bytes


def _append(items: list[Item], item: Item) -> None:
    """Adds an item to a chain, merging updates whose intermediate states need not be seen.

    So the chain of a request that is preempted or paused and resumed for hours while the store is
    unreachable stays short.
    """
    flapping = {State.RUNNING, State.PREEMPTED, State.PAUSED}
    last, before = (None, None, *items)[:-3:-1]
    if not isinstance(item, Update) or not isinstance(last, Update):
        items.append(item)
    elif _same(last, item):
        items[-1] = _merged(last, item)
    elif (
        isinstance(before, Update) and _same(before, item) and {last.state, item.state} <= flapping
    ):
        items[-2:] = [_merged(_merged(before, last), item)]
    else:
        items.append(item)


def _same(one: Update, other: Update) -> bool:
    return (one.state, one.epoch, one.create_time_unix_s) == (
        other.state,
        other.epoch,
        other.create_time_unix_s,
    )


def _merged(old: Update, new: Update) -> Update:
    """The newer of two updates, with fields that are None filled in from the older update."""
    known = {f.name: v for f in fields(Update) if (v := getattr(new, f.name)) is not None}
    return replace(old, **known)
