"""Which scheduler should own which worker: a pure function of who is there and who owns what."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping


def assign(
    workers: Collection[str], members: Collection[str], owners: Mapping[str, str]
) -> dict[str, str]:
    """The member that should own each worker; every member computes the same.

    Each member gets the same number of workers, or one more. As few workers as possible leave their
    owner; where a worker goes is decided by rendezvous hashing.

    Args:
        workers: names.
        members: names of schedulers that may own workers.
        owners: the member that owns a worker now.
    """
    if not members:
        return {}
    owned = {worker: owners[worker] for worker in workers if owners.get(worker) in members}
    counts = Counter(owned.values())
    # Who has most keeps most: of the members that get one more, those come first.
    by_count = sorted(members, key=lambda member: (-counts[member], member))
    least, num_more = divmod(len(workers), len(members))
    room = {member: least + (i < num_more) for i, member in enumerate(by_count)}
    assigned: dict[str, str] = {}
    for worker, owner in sorted(owned.items(), key=lambda item: (-_weight(*item), item[0])):
        if room[owner]:
            room[owner] -= 1
            assigned[worker] = owner
    for worker in sorted(set(workers) - assigned.keys()):
        open_members = [member for member in members if room[member]]
        chosen = max(open_members, key=lambda member: (_weight(worker, member), member))
        room[chosen] -= 1
        assigned[worker] = chosen
    return assigned


def _weight(worker: str, member: str) -> int:
    """How well a worker and a member go together; the same in every process."""
    digest = hashlib.blake2b(f"{worker}\0{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
