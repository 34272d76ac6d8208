"""`python -m tests.chaos.broken FAULT SERVICE ...`: a service that is broken on purpose.

So the checker is tested: a harness that sees no fault in a broken service proves nothing.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.service.columns import pack_int32, unpack_int32


def _without_fencing() -> None:
    """The store takes writes of any epoch."""
    from headrace.status import scripts

    source = scripts._WRITE
    for guard in (
        "if new_epoch < record.epoch or is_lost(record, new_epoch, name, run) then",
        "if epoch < record.epoch or is_lost(record, epoch, name, run) then",
    ):
        assert guard in source, "the script has another guard by now"
        source = source.replace(guard, "if false then")
    scripts._WRITE = source


def _with_a_shuffled_journal() -> None:
    """The tokens of each piece of the journal are written backwards."""
    from headrace.status.records import Tokens
    from scheduler.token_journal import TokenJournal

    take = TokenJournal.take

    def take_backwards(self: TokenJournal) -> list[Any]:
        return [
            replace(item, token_ids=pack_int32(unpack_int32(item.token_ids, "")[::-1]))
            if isinstance(item, Tokens)
            else item
            for item in take(self)
        ]

    TokenJournal.take = take_backwards  # type: ignore[method-assign]


def _with_a_later_position() -> None:
    """Resume begins one token after the token that the caller asks for."""
    from router.rpc import wire

    first_tokens = wire.first_tokens
    wire.first_tokens = lambda *asked: [first + 1 for first in first_tokens(*asked)]


FAULTS: dict[str, Callable[[], None]] = {
    "fencing": _without_fencing,
    "journal": _with_a_shuffled_journal,
    "position": _with_a_later_position,
}

if __name__ == "__main__":
    fault, service, *arguments = sys.argv[1:]
    FAULTS[fault]()
    sys.argv = [service, *arguments]
    runpy.run_module(service, run_name="__main__", alter_sys=True)
