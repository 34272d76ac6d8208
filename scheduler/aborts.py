"""Ends requests of any router by their ids."""

from collections.abc import Iterable, Iterator, Sequence

from headrace.service.sampling import MAX_N
from scheduler.core.plan import RequestStatus
from scheduler.requests import LiveRequest
from scheduler.switchboard import Switchboard
from scheduler.updates import RouterUpdate


def abort(switchboard: Switchboard, request_ids: Sequence[str]) -> set[str]:
    """End those of the requests that live here; returns their ids.

    Every router hears of the others, which may wait in its queue, and of a request of several
    completions, since the rest of them may be anywhere.
    """
    found, elsewhere = set(), []
    for request_id in dict.fromkeys(request_ids):
        is_whole = False
        for request in list(_completions(switchboard, request_id)):
            found.add(request_id)
            is_whole = is_whole or request.submission.request_id == request_id
            switchboard.requests.release_id(request)
            request.owner.cancel(request, RequestStatus.ABORTED)
        if not is_whole:
            elsewhere.append(request_id)
    if elsewhere:
        switchboard.tell_all(RouterUpdate(aborts=tuple(elsewhere)))
    return found


def _completions(switchboard: Switchboard, request_id: str) -> Iterator[LiveRequest]:
    """The live completions of a request."""
    names: Iterable[str] = (request_id, *(f"{request_id}#{index}" for index in range(MAX_N)))
    for name in names:
        if (request := switchboard.requests.find(name)) is not None:
            yield request
