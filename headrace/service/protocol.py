"""Enums of the protocol and the words of `headrace.vocabulary`, matched by name."""

from enum import StrEnum
from typing import Any, Generic, TypeVar

from headrace import vocabulary
from headrace.v1 import common_pb2, scheduler_pb2

E = TypeVar("E", bound=StrEnum)
D = TypeVar("D")


class Words(Generic[E]):
    """The words of one enum and their numbers, both ways."""

    def __init__(self, kind: type[E], numbers: Any, prefix: str) -> None:
        """numbers is the protocol's enum; the name of each value is prefix and the word's name."""
        self._number_by_word = {word: numbers.Value(f"{prefix}_{word.name}") for word in kind}
        self._word_by_number = {number: word for word, number in self._number_by_word.items()}

    def number(self, word: E) -> Any:
        """What is written for the word."""
        return self._number_by_word[word]

    def word(self, number: int, unknown: D) -> E | D:
        """The word that was read; `unknown` for a number that is unset or of a newer version."""
        return self._word_by_number.get(number, unknown)


FINISH_REASON = Words(vocabulary.FinishReason, common_pb2.FinishReason, "FINISH_REASON")
WORKER_ROLE = Words(vocabulary.WorkerRole, common_pb2.WorkerRole, "WORKER_ROLE")
WORKER_STATE = Words(vocabulary.WorkerState, common_pb2.WorkerState, "WORKER_STATE")
CANCEL_REASON = Words(vocabulary.CancelReason, scheduler_pb2.CancelReason, "CANCEL_REASON")
REFUSAL_REASON = Words(vocabulary.RefusalReason, scheduler_pb2.RefusalReason, "REFUSAL_REASON")
