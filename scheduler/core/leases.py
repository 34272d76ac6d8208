"""Leases: KV blocks that are being transferred between this worker and another one.

A lease holds references to its blocks, as a running request does, so that no step writes to a block
that the other worker reads, or reads a block that the other worker writes.

* An import gets free blocks for the full blocks of a waiting request's prompt that another worker
  has computed. When the transfer has succeeded, the blocks get their digests: from then on the
  request finds them in the prefix cache, as any other request does, and computes the rest. When the
  transfer has failed, the blocks are freed, and the request computes its whole prompt.
* An export keeps the full blocks of a request that has ended for the worker that continues it.

A lease ends when its request is admitted or ends, when the transfer fails, and at the latest when
its time is over. The plan names the leases that ended; the worker stops their transfers before it
executes the plan, so blocks of ended leases may be used in the same plan.
"""

from collections.abc import Iterable, Iterator, Sequence

from headrace.lazy_heap import LazyHeap
from scheduler.core.kv_cache import KvCache
from scheduler.core.plan import Lease
from scheduler.core.request import Request

# Imports hold at most this share of the pool, so that running requests can grow.
MAX_IMPORTED_SHARE = 0.5


class Leases:
    """All leases of one worker; at most one import a request."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._leases: dict[int, Lease] = {}
        self._import_by_key: dict[int, int] = {}
        self._expiries: LazyHeap[int, int] = LazyHeap()
        self._num_imported_blocks = 0
        self._committed: set[int] = set()
        # Also the id of the next lease.
        self.num_begun = 0
        # Leases whose beginning, and whose end, no plan has named yet.
        self.begun: list[Lease] = []
        self.ended: list[int] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def has_any(self) -> bool:
        """Whether there are leases, or ends of leases that no plan has named."""
        return bool(self._leases or self.ended)

    def is_committed(self, lease: Lease) -> bool:
        """Whether all blocks of a lease have their contents."""
        return not lease.is_import or lease.lease_id in self._committed

    def of(self, key: int) -> Lease | None:
        """The import of a request, if there is one."""
        lease_id = self._import_by_key.get(key)
        return None if lease_id is None else self._leases[lease_id]

    def begin_import(self, request: Request, num_reserved_blocks: int) -> bool:
        """Lease blocks for the prompt of a request with a remote prefix.

        Args:
            request: waits, and has no lease.
            num_reserved_blocks: stay free.

        Returns:
            False if there are too few free blocks now.
        """
        remote = request.spec.remote_prefix
        assert remote is not None, f"{request.request_id} has nothing to import"
        kv = self._kv
        hit = kv.find_prefix(request)
        num_present = len(hit.block_ids)
        num_blocks = min(remote.num_blocks, (len(request.token_ids) - 1) // kv.block_size)
        num_missing = max(num_blocks - num_present, 0)
        if not num_missing:
            request.is_ready = True
            return True
        if self._num_imported_blocks + num_missing > kv.pool.num_usable * MAX_IMPORTED_SHARE:
            return False
        if num_missing + hit.num_unreferenced + num_reserved_blocks > kv.pool.num_free:
            return False
        kv.pool.touch(hit.block_ids)
        block_ids = hit.block_ids + kv.pool.allocate(num_missing)
        digests = request.block_hashes.digests[:num_blocks]
        self._begin(request.key, remote.source, block_ids, digests, num_present, remote.expires_at)
        return True

    def begin_export(
        self, key: int, block_ids: Sequence[int], digests: Sequence[bytes], expires_at: float
    ) -> Lease:
        """Keep blocks, which are referenced and have their digests, for another worker."""
        self._kv.pool.touch(block_ids)
        return self._begin(key, "", block_ids, digests, len(block_ids), expires_at)

    def commit(self, lease_id: int) -> int | None:
        """All blocks of an import have their contents; the request's key, None if it ended."""
        lease = self._leases.get(lease_id)
        if lease is None or self.is_committed(lease):
            return None
        self._committed.add(lease_id)
        self._kv.pool.register(lease.missing_block_ids, lease.digests[lease.num_present :])
        return lease.key

    def end(self, lease_id: int) -> int | None:
        """Free the blocks of a lease; its request's key, None if the lease has ended."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._expiries.remove(lease_id)
        if lease.is_import:
            del self._import_by_key[lease.key]
            self._num_imported_blocks -= len(lease.missing_block_ids)
        self._committed.discard(lease_id)
        self._kv.pool.release(lease.block_ids)
        self.ended.append(lease_id)
        return lease.key

    def end_import_of(self, key: int) -> None:
        """End the import of a request, if there is one."""
        lease_id = self._import_by_key.get(key)
        if lease_id is not None:
            self.end(lease_id)

    def expire(self, now: float) -> list[int]:
        """End the leases whose time is over; the keys of their requests."""
        if not self._leases:
            return []
        keys = [self.end(lease_id) for lease_id in self._expiries.pop_through(now)]
        return [key for key in keys if key is not None]

    def take_news(self) -> tuple[tuple[Lease, ...], tuple[int, ...]]:
        """The leases that began and those that ended since the last call.

        A lease that did both is not among those that began.
        """
        if not self.begun and not self.ended:
            return (), ()
        begun = tuple(lease for lease in self.begun if lease.lease_id in self._leases)
        ended = tuple(self.ended)
        self.begun.clear()
        self.ended.clear()
        return begun, ended

    def _begin(
        self,
        key: int,
        source: str,
        block_ids: Sequence[int],
        digests: Sequence[bytes],
        num_present: int,
        expires_at: float,
    ) -> Lease:
        lease = Lease(
            self.num_begun, key, source, tuple(block_ids), tuple(digests), num_present, expires_at
        )
        self.num_begun += 1
        self._add(lease)
        self.begun.append(lease)
        return lease

    def restore(
        self,
        num_begun: int,
        live: Iterable[Lease],
        committed: Iterable[int],
        begun: Iterable[int],
        ended: Iterable[int],
    ) -> None:
        """Bring new Leases into a state, whose blocks are referenced already.

        committed, begun and ended are ids; plans have yet to name the last two.
        """
        self.num_begun = num_begun
        self.ended.extend(ended)
        for lease in live:
            self._add(lease)
        self._committed.update(committed)
        self.begun.extend(self._leases[lease_id] for lease_id in begun)

    def _add(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease
        self._expiries.push(lease.lease_id, lease.expires_at, lease.lease_id)
        if lease.is_import:
            self._import_by_key[lease.key] = lease.lease_id
            self._num_imported_blocks += len(lease.missing_block_ids)
