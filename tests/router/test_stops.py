"""Stop strings are found as tokens come, whatever the client reads; only what counts is counted."""

from array import array

import pytest

from headrace.vocabulary import FinishReason
from router.outputs import CompletionFinish, Logprobs, StepOutputs
from router.stream import replies
from tests.router.bench import TOKENIZER, Bench


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).tolist()


END = TOKENIZER.special_id_by_token["<|end|>"]


class Stopping(Bench):
    """A bench whose scheduler says what a test tells it to, and whose client reads at the end."""

    def enter(self, **fields):
        self.leave, self.request = super().enter("r", **fields)
        self.completion = self.request.completions[0]
        return self.completion

    def say(self, token_ids, *, finish=None, draft_counts=(), has_logprobs=False):
        handle = self.completion.handle
        self.router.live.on_step(
            StepOutputs(
                handles=[handle],
                num_new_tokens=[len(token_ids)],
                token_ids=array("i", token_ids),
                draft_counts=list(draft_counts),
                finish_by_handle={handle: finish} if finish else {},
                logprobs=[Logprobs(handle, [b""] * len(token_ids), ())] * has_logprobs,
            )
        )
        if finish is not None:
            self.links["s"].sent.pop(handle, None)

    async def read(self):
        """All that the client gets: text, tokens, and the last usage."""
        text, num_tokens = "", 0
        async for reply in replies(self.request, self.router):
            for delta in reply.deltas:
                text += delta.text
                num_tokens += len(delta.token_ids)
        self.leave()
        self.assert_empty()
        return text, num_tokens, reply.usage


async def test_a_stop_string_ends_the_request_while_its_client_reads_nothing():
    bench = Stopping()
    completion = bench.enter(stop=("END",), num_tokens=100)
    for token_id in ids("a END of it"):
        if completion.finish is None:
            bench.say([token_id])
    assert completion.finish == CompletionFinish(FinishReason.STOP, stop="END")
    assert bench.links["s"].cancelled == [(completion.handle, FinishReason.STOP)]
    num_tokens = len(ids("a END"))
    assert bench.request.account.virtual_tokens == 100 + 2 * num_tokens
    text, num_read, usage = await bench.read()
    assert (text, num_read, usage.completion_tokens) == ("a ", num_tokens, num_tokens)


async def test_what_came_after_a_stop_string_in_its_step_counts_nowhere():
    bench = Stopping()
    completion = bench.enter(stop=("END",), num_tokens=100, num_logprobs=0)
    token_ids, num_tokens = ids("a END of it all"), len(ids("a END"))
    num_extra = len(token_ids) - 1
    bench.say(token_ids, draft_counts=[(num_extra, num_extra)], has_logprobs=True)
    assert len(completion.logprobs) == num_tokens
    assert bench.request.account.virtual_tokens == 100 + 2 * num_tokens
    _, num_read, usage = await bench.read()
    assert (num_read, usage.completion_tokens) == (num_tokens, num_tokens)
    assert usage.accepted_draft_tokens == num_tokens - 1


async def test_of_merged_steps_no_more_drafts_are_accepted_than_came_without_a_step():
    """Three steps of four tokens; the stop string ends in the second one."""
    bench = Stopping()
    bench.enter(stop=("END",), num_tokens=100)
    token_ids = ids("a END of it all, more")[:12]
    num_tokens = len(ids("a END"))
    bench.say(token_ids, draft_counts=[(9, 9)])
    _, num_read, usage = await bench.read()
    assert (num_read, usage.draft_tokens) == (num_tokens, 9)
    num_steps = -(-num_tokens // 4)
    assert usage.accepted_draft_tokens <= num_tokens - num_steps


async def test_a_stop_string_in_the_last_step_wins_over_how_the_scheduler_ended_it():
    bench = Stopping()
    bench.enter(stop=("END",))
    bench.say(ids("a END of it"), finish=CompletionFinish(FinishReason.LENGTH))
    assert bench.completion.finish == CompletionFinish(FinishReason.STOP, stop="END")
    assert not bench.links["s"].cancelled
    assert (await bench.read())[:2] == ("a ", len(ids("a END")))


async def test_the_token_that_ends_a_request_is_not_searched_for_stop_strings():
    bench = Stopping()
    bench.enter(stop=("h",))
    [last] = ids("h")
    bench.say([*ids("a"), last], finish=CompletionFinish(FinishReason.STOP, stop_token_id=last))
    assert bench.completion.finish.stop is None
    assert (await bench.read())[:2] == ("a", 2)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("stop_token_id", [END, None])
async def test_a_stop_string_that_is_a_control_token_stops_at_that_token(
    keeps, includes, stop_token_id
):
    bench = Stopping()
    bench.enter(
        stop=("zzz", "<|end|>"),
        stop_by_token_id={END: "<|end|>"},
        keep_special_tokens=keeps,
        include_stop_str_in_output=includes,
    )
    # stop_token_id None: the model's own end of sequence is that token.
    bench.say(
        [*ids("az"), END], finish=CompletionFinish(FinishReason.STOP, stop_token_id=stop_token_id)
    )
    finish = bench.completion.finish
    assert (finish.reason, finish.stop) == (FinishReason.STOP, "<|end|>")
    assert (await bench.read())[:2] == ("az<|end|>" if includes else "az", 3)


async def test_a_control_tokens_name_in_ordinary_text_is_found_as_text():
    bench = Stopping()
    bench.enter(stop=("<|end|>",), stop_by_token_id={END: "<|end|>"})
    bench.say([token_id for char in "a<|end|>b" for token_id in ids(char)])
    assert bench.completion.finish.stop == "<|end|>"
    assert (await bench.read())[0] == "a"


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.LENGTH])
async def test_what_is_held_back_is_shown_when_the_request_ends_otherwise(reason):
    bench = Stopping()
    bench.enter(stop=("END",))
    bench.say(ids("an EN"))
    if reason is FinishReason.ABORTED:
        bench.router.abort("r")
    else:
        bench.say([], finish=CompletionFinish(reason))
    assert bench.completion.finish.reason is reason
    assert (await bench.read())[0] == "an EN"
