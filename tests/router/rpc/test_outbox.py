"""The order in which things are told to a scheduler, and how much at a time."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import scheduler_pb2
from router.rpc.outbox import SchedulerOutbox


def submission(handle, request_id="r", num_bytes=4):
    return scheduler_pb2.Submission(
        handle=handle, request_id=request_id, prompt_token_ids=bytes(num_bytes)
    )


def cancellation(handle):
    return scheduler_pb2.Cancellation(handle=handle)


def taken(outbox):
    messages = []
    while outbox:
        messages.append(outbox.take())
    return messages


def test_what_waits_is_one_message():
    outbox = SchedulerOutbox()
    outbox.submit(submission(1, "a"))
    outbox.submit(submission(2, "b"))
    outbox.cancel("a", cancellation(1))
    outbox.pause(scheduler_pb2.Pause(handle=2, paused=True))
    [message] = taken(outbox)
    assert [one.handle for one in message.submissions] == [1, 2]
    assert [one.handle for one in message.cancellations] == [1]
    assert [one.handle for one in message.pauses] == [2]


def test_long_prompts_go_in_messages_that_are_taken_and_ends_after_them():
    outbox = SchedulerOutbox()
    for handle in range(3):
        outbox.submit(submission(handle, num_bytes=3 * 2**19))
    outbox.cancel("r", cancellation(0))
    messages = taken(outbox)
    assert [len(message.submissions) for message in messages] == [1, 1, 1]
    assert [len(message.cancellations) for message in messages] == [0, 0, 1]


def test_an_id_that_is_used_again_goes_after_the_end_of_the_one_before():
    outbox = SchedulerOutbox()
    outbox.cancel("same", cancellation(1))
    outbox.submit(submission(2, "other"))
    outbox.submit(submission(3, "same"))
    first, second = taken(outbox)
    assert ([one.handle for one in first.submissions], len(first.cancellations)) == ([2], 1)
    assert ([one.handle for one in second.submissions], len(second.cancellations)) == ([3], 0)


@given(moves=st.lists(st.tuples(st.sampled_from(["use", "end", "take"]), st.integers(0, 2))))
def test_a_reader_of_submissions_first_never_finds_an_id_in_use(moves):
    outbox, live, handle, messages = SchedulerOutbox(), {}, 0, []
    for move, number in moves:
        if move == "use" and number not in live:
            handle += 1
            live[number] = handle
            outbox.submit(submission(handle, str(number), num_bytes=2**20))
        elif move == "end" and number in live:
            outbox.cancel(str(number), cancellation(live.pop(number)))
        elif move == "take" and outbox:
            messages.append(outbox.take())
    there = {}
    for message in (*messages, *taken(outbox)):
        for one in message.submissions:
            assert one.request_id not in there.values()
            there[one.handle] = one.request_id
        for one in message.cancellations:
            del there[one.handle]
    assert there == {handle: str(number) for number, handle in live.items()}
