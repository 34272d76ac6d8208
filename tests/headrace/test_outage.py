"""When a stream goes on after its connection was lost, and what of a resumed stream is new."""

from dataclasses import replace

import pytest

from headrace.client import ResumePolicy, ServiceError
from headrace.connections import UnreachableError
from headrace.resuming import Outage, Received
from headrace.service.errors import not_found, unavailable
from headrace.types import Delta, TokenLogprobs, Usage
from headrace.vocabulary import FinishReason

QUICK = ResumePolicy(timeout_s=60, first_backoff_s=0.01, max_backoff_s=0.05)
LOST = UnreachableError("Socket closed", has_connected=True)
REFUSED = UnreachableError("failed to connect to all addresses", has_connected=False)


def num_tries(error, *, lasted_s, timeout_s=10.0):
    """Failures in a row until a stream is given up."""
    policy = ResumePolicy(timeout_s=timeout_s, first_backoff_s=1.0, max_backoff_s=1.0)
    outage = Outage(policy, 1, is_sent=True)
    num = 1
    while outage.wait_s(error, lasted_s) is not None:
        num += 1
    return num


def test_a_call_that_held_is_no_part_of_the_outage():
    assert 11 <= num_tries(LOST, lasted_s=600.0) <= 21
    assert num_tries(LOST, lasted_s=0.9) < 11
    assert num_tries(REFUSED, lasted_s=600.0) == 2, "it never had a connection"


def test_news_begin_the_count_anew():
    outage = Outage(ResumePolicy(timeout_s=3.0, first_backoff_s=2.0), 1, is_sent=True)
    for _ in range(100):
        assert outage.wait_s(LOST, 0.0) is not None
        outage.end()


def test_the_wait_grows_to_its_maximum_and_no_two_clients_wait_alike():
    policy = ResumePolicy(timeout_s=1e9, first_backoff_s=0.1, max_backoff_s=2.0)
    outages = [Outage(policy, 1, is_sent=True) for _ in range(8)]
    waits = [[outage.wait_s(LOST, 0.0) for outage in outages] for _ in range(10)]
    assert all(0.05 <= wait <= 0.1 for wait in waits[0])
    assert all(1.0 <= wait <= 2.0 for wait in waits[-1])
    assert len(set(waits[-1])) == 8


def test_a_router_that_says_when_is_given_the_time_it_wants_unless_there_is_another():
    error = unavailable("DRAINING", "shutting down", 7.0)
    assert Outage(QUICK, 1, is_sent=True).wait_s(error, 0.0) == 7.0
    assert Outage(QUICK, 2, is_sent=True).wait_s(error, 0.0) < 1.0


def piece(position, *tokens, text="", **changed):
    return Delta(
        request_id="r1", token_ids=tokens, first_token_position=position, text=text, **changed
    )


def test_text_that_came_without_tokens_comes_once():
    received = Received()
    for delta in (piece(0, 5, text="a"), piece(1, text="bc"), piece(1, text="d")):
        received.take(delta)
    received.rewind()
    again = [received.take(piece(1, text=text)).text for text in ("b", "cde")]
    assert again == ["", "e"]
    assert received.take(piece(1, 6, text="f")).text == "f"


def test_text_that_came_otherwise_before_is_an_error():
    received = Received()
    received.take(piece(0, text="abc"))
    received.rewind()
    with pytest.raises(ServiceError, match="does not go on where it was"):
        received.take(piece(0, 5, text="abd"))


def test_the_end_of_a_completion_comes_once_and_the_usage_still_comes():
    received = Received()
    end = piece(0, finish_reason=FinishReason.STOP, text="x")
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    received.take(end)
    received.rewind()
    assert received.take(end) is None
    again = received.take(replace(end, usage=usage))
    assert (again.text, again.finish_reason, again.usage) == ("", None, usage)


def test_log_probabilities_of_the_prompt_come_once():
    received = Received()
    logprobs = (TokenLogprobs(1, -0.5, 1),)
    assert received.take(piece(0, text="a", prompt_logprobs=logprobs)).prompt_logprobs == logprobs
    received.rewind()
    assert received.take(piece(0, 5, text="ab", prompt_logprobs=logprobs)).prompt_logprobs == ()


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_what_no_router_knows_is_sent_again_where_that_gives_the_same(is_repeatable):
    outage = Outage(QUICK, 2, is_sent=True, is_repeatable=is_repeatable)
    assert outage.wait_s(LOST, 0.0) is not None
    unknown = not_found("UNKNOWN_REQUEST", "nothing is known of r1")
    waits = []
    while not outage.is_forgotten and (wait_s := outage.wait_s(unknown, 1.0)) is not None:
        waits.append(wait_s)
    assert len(waits) >= 2, "all routers were asked"
    assert outage.is_forgotten is is_repeatable
