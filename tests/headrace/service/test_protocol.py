"""The words of the vocabulary are those of the protocol, all of them."""

import pytest

from headrace import vocabulary
from headrace.service import protocol
from headrace.v1 import common_pb2, scheduler_pb2

ENUMS = {
    "FINISH_REASON": (vocabulary.FinishReason, common_pb2.FinishReason),
    "WORKER_ROLE": (vocabulary.WorkerRole, common_pb2.WorkerRole),
    "WORKER_STATE": (vocabulary.WorkerState, common_pb2.WorkerState),
    "CANCEL_REASON": (vocabulary.CancelReason, scheduler_pb2.CancelReason),
    "REFUSAL_REASON": (vocabulary.RefusalReason, scheduler_pb2.RefusalReason),
}


@pytest.mark.parametrize("prefix", ENUMS)
def test_every_word_has_a_number_and_every_number_a_word(prefix):
    kind, numbers = ENUMS[prefix]
    words = getattr(protocol, prefix)
    assert {f"{prefix}_{word.name}" for word in kind} == set(numbers.keys()) - {
        f"{prefix}_UNSPECIFIED"
    }
    for word in kind:
        assert words.word(words.number(word), None) is word
    assert words.word(0, None) is None
    assert words.word(99, None) is None
