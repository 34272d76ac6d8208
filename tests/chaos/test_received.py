"""Each broken stream is a fault to the checker, and an intact stream none."""

import random

import pytest

from headrace.v1 import common_pb2, inference_pb2
from tests.chaos import stub_model, wanted
from tests.chaos.received import Received

LENGTH = common_pb2.FINISH_REASON_LENGTH
PROMPT = b"a river"


def a_request(**sampling) -> wanted.Wanted:
    request = inference_pb2.GenerateRequest(request_id="r", text=PROMPT.decode())
    request.sampling.MergeFrom(
        common_pb2.SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})
    )
    return wanted.Wanted(request, "read", [wanted.answer(request, PROMPT, 0)])


def message(request: wanted.Wanted, first: int, end: int, *, index=0, **changes):
    """Tokens [first, end) as an undisturbed server sends them; the last with the end."""
    answer = request.answers[index]
    ids = answer.token_ids[first:end]
    before = len(stub_model.text_of(answer.token_ids[:first]))
    delta = inference_pb2.OutputDelta(
        index=index,
        token_ids=ids,
        first_token_position=first,
        text=stub_model.text_of(answer.token_ids[:end])[before:],
    )
    if end == len(answer.token_ids):
        delta.finish_reason = LENGTH
    for name, value in changes.items():
        setattr(delta, name, value)
    return inference_pb2.GenerateResponse(request_id="r", outputs=[delta])


def faults_of(request: wanted.Wanted, *messages) -> list[str]:
    received = Received(request)
    for one in messages:
        received.take(one)
    return received.faults


@pytest.mark.parametrize("cut", [1, 7, 20, 39])
def test_an_answer_in_pieces_is_without_fault(cut):
    request = a_request()
    assert not faults_of(request, message(request, 0, cut), message(request, cut, 40))


def test_a_token_that_is_left_out_is_seen():
    request = a_request()
    assert faults_of(request, message(request, 0, 10), message(request, 11, 40))


def test_a_token_that_comes_twice_is_seen():
    request = a_request()
    assert faults_of(request, message(request, 0, 10), message(request, 9, 40))


def test_a_token_that_comes_twice_under_the_next_position_is_seen():
    request = a_request()
    again = message(request, 9, 40, first_token_position=10)
    assert faults_of(request, message(request, 0, 10), again)


def test_another_text_is_seen():
    request = a_request()
    text = request.answers[0].text
    assert faults_of(request, message(request, 0, 40, text=text[:-1]))
    assert faults_of(request, message(request, 0, 10, text="another text"))


def test_an_end_before_the_last_token_is_seen():
    request = a_request()
    assert faults_of(request, message(request, 0, 10, finish_reason=LENGTH))
    assert faults_of(request, message(request, 0, 40, finish_reason=common_pb2.FINISH_REASON_STOP))


def test_an_abort_that_nobody_asked_for_is_seen():
    request = a_request()
    end = message(request, 0, 10, finish_reason=common_pb2.FINISH_REASON_ABORTED)
    assert faults_of(request, end)


def test_missing_log_probabilities_are_seen():
    request = a_request(logprobs=1)
    assert faults_of(request, message(request, 0, 40))


def test_tokens_depend_on_each_token_before():
    rng = random.Random(0)
    for _ in range(20):
        prompt = [rng.randrange(97, 122) for _ in range(30)]
        other = list(prompt)
        other[rng.randrange(30)] = 122
        assert stub_model.generated(prompt, 20, seed=1) != stub_model.generated(other, 20, seed=1)


def test_tokens_do_not_depend_on_where_the_prompt_ends():
    """So that a request can be taken up from any prefix of its tokens... but for their positions,
    which the worker counts from the prompt's end.
    """
    whole = stub_model.generated(list(PROMPT), 60, seed=3)
    assert whole[:20] == stub_model.generated(list(PROMPT), 20, seed=3)
