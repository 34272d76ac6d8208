"""The completions in flight: each under a handle, at a worker of a scheduler that a link leads to.

A completion in flight takes credit at its worker, except while it is paused.
"""

from router.core.placement import Need, WorkerKey, WorkerPool
from router.outputs import CompletionFinish
from router.request import ClientCompletion, Owner, SchedulerLink


class Flights:
    """Owns the links and the handles; the dispatcher is the only writer."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.by_handle: dict[int, ClientCompletion] = {}
        self._links: dict[str, SchedulerLink] = {}
        self._last_handle = 0

    def __len__(self) -> int:
        return len(self.by_handle)

    def __contains__(self, completion: ClientCompletion) -> bool:
        return self.by_handle.get(completion.handle) is completion

    def connect(self, link: SchedulerLink) -> None:
        """The link can be used, once its workers are reported."""
        self._links[link.name] = link

    def disconnect(self, link: SchedulerLink) -> tuple[list[ClientCompletion], bool]:
        """The link broke.

        Returns:
            The completions in flight there, and whether the scheduler was draining.
        """
        self._links.pop(link.name, None)
        was_draining = self.pool.forget(link.name)
        return [c for c in self.by_handle.values() if c.link is link], was_draining

    def worker_of(self, owner: Owner | None) -> WorkerKey | None:
        """The worker where a completion may still live; None while no link leads there."""
        if owner is None:
            return None
        for link in self._links.values():
            if link.scheduler_id == owner.scheduler_id:
                key = self.pool.key_of(link.name, owner.worker_id)
                if key is not None:
                    return key
        return None

    def begin(self, completion: ClientCompletion, worker: WorkerKey, need: Need) -> None:
        """Send a completion to a worker, under a new handle."""
        completion.handle = self._next_handle()
        completion.link = self._links[worker.scheduler]
        completion.num_dispatches += 1
        completion.is_admitted = False
        completion.num_sent_tokens = len(completion.token_ids)
        self.by_handle[completion.handle] = completion
        completion.sent = self.pool.send(worker, need)
        completion.link.submit(completion)

    def end(self, completion: ClientCompletion) -> None:
        """Free the completion's handle and its credit, which a pause has freed already."""
        del self.by_handle[completion.handle]
        if not completion.is_paused:
            self.pool.finished(completion.flight[1], was_admitted=completion.is_admitted)

    def cancel(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """End a completion in its scheduler too."""
        completion.flight[0].cancel(completion, finish)
        self.end(completion)

    def pause(self, completion: ClientCompletion) -> None:
        """Let the scheduler pause a completion, which then takes no credit."""
        link, sent = completion.flight
        self.pool.paused(sent)
        link.set_paused(completion.handle, is_paused=True)

    def go_on(self, completion: ClientCompletion) -> None:
        """Let the scheduler continue a paused completion."""
        link, sent = completion.flight
        self.pool.continued(sent)
        link.set_paused(completion.handle, is_paused=False)

    def _next_handle(self) -> int:
        """A handle that is not in use; handles are uint32 on the wire and wrap."""
        while True:
            self._last_handle = self._last_handle % (2**32 - 1) + 1
            if self._last_handle not in self.by_handle:
                return self._last_handle
