"""Enums of the protocol and the words of `headrace.vocabulary`, matched by name."""

from enum import StrEnum
from typing import Any, Generic, TypeVar

from headrace import vocabulary
from headrace.v1 import common_pb2, scheduler_pb2

E = TypeVar("E", bound=StrEnum)
D = TypeVar("D")


class Words(Generic[E]):
    """Translates between the words of an enum and the protocol's numbers."""

    def __init__(self, kind: type[E], numbers: Any, prefix: str) -> None:
        """numbers is the protocol's enum, whose values are named `{prefix}_{word.name}`."""
        self._number_by_word = {word: numbers.Value(f"{prefix}_{word.name}") for word in kind}
        self._word_by_number = {number: word for word, number in self._number_by_word.items()}

    def number(self, word: E) -> Any:
        """The number that is sent for the word."""
        return self._number_by_word[word]

    def word(self, number: int, unknown: D) -> E | D:
        """The word of a received number; `unknown` for 0 and for numbers of newer versions."""
        return self._word_by_number.get(number, unknown)


FINISH_REASON = Words(vocabulary.FinishReason, common_pb2.FinishReason, "FINISH_REASON")
WORKER_ROLE = Words(vocabulary.WorkerRole, common_pb2.WorkerRole, "WORKER_ROLE")
WORKER_STATE = Words(vocabulary.WorkerState, common_pb2.WorkerState, "WORKER_STATE")
CANCEL_REASON = Words(vocabulary.CancelReason, scheduler_pb2.CancelReason, "CANCEL_REASON")
REFUSAL_REASON = Words(vocabulary.RefusalReason, scheduler_pb2.RefusalReason, "REFUSAL_REASON")
