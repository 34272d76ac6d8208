"""A router's public face, end to end over real gRPC, with a scripted scheduler behind it."""

import grpc
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2
from tests.router.fake_scheduler import MODEL, Script, worker
from tests.router.stack import running_stack
from tests.router.tiny_models import byte_level_model

TOKENIZER = byte_level_model().tokenizer
END = TOKENIZER.vocab_size - 1


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).tolist()


def says(text, **ending):
    return lambda _submission: Script(ids(text), **ending)


def outputs(messages, index=0):
    return [o for message in messages for o in message.outputs if o.index == index]


def text_of(messages, index=0):
    return "".join(output.text for output in outputs(messages, index))


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def test_streams_the_text_that_the_tokens_spell(stack):
    stack.scheduler.script = says("hello world 🎉")
    messages = await stack.answer(request_id="r-1")
    assert text_of(messages) == "hello world 🎉"
    token_ids = []
    for message in messages:
        assert message.request_id == "r-1"
        for output in message.outputs:
            assert output.first_token_position == len(token_ids)
            token_ids.extend(output.token_ids)
    assert token_ids == ids("hello world 🎉")


async def test_the_last_message_has_reason_and_usage_and_the_trailer_has_times(stack):
    stack.scheduler.script = says("hello")
    call = stack.generate("hello world")
    messages = [message async for message in call]
    assert outputs(messages)[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids("hello world")), 1)
    trailer = dict(await call.trailing_metadata())
    for key in ("queue-s", "prefill-s", "decode-s"):
        assert 0 <= float(trailer[f"x-headrace-{key}"]) < 20
    assert trailer["x-headrace-preemptions"] == "1"
    assert trailer["x-headrace-cached-tokens"] == "0"
    assert trailer["x-headrace-durable"] == "false"


async def test_drafts_are_counted_over_all_completions(stack):
    stack.scheduler.tokens_per_step = 2
    stack.scheduler.script = lambda _: Script(ids("hello world"), draft_counts=(3, 1))
    call = stack.generate(sampling={"n": 2})
    messages = [message async for message in call]
    num_steps = 2 * -(-len(ids("hello world")) // 2)
    usage = messages[-1].usage
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (3 * num_steps, num_steps)
    trailer = dict(await call.trailing_metadata())
    assert trailer["x-headrace-draft-tokens"] == str(3 * num_steps)
    assert trailer["x-headrace-accepted-tokens"] == str(num_steps)


async def test_tells_the_scheduler_everything_but_text(stack):
    await stack.answer(
        "hello",
        request_id="r",
        priority=-3,
        tenant="t",
        cache_salt="salt",
        metadata=(("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),),
        sampling={"max_tokens": 3, "temperature": 0, "stop": ["zzz"], "seed": 9, "top_k": 4},
    )
    [submission] = stack.scheduler.submissions
    assert (submission.request_id, submission.epoch, submission.model) == ("r", 1, MODEL)
    assert (submission.priority, submission.tenant, submission.cache_salt) == (-3, "t", "1:tsalt")
    assert submission.worker_id == "worker-0"
    assert submission.traceparent.startswith("00-" + "1" * 32)
    sampling = submission.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.top_k, sampling.n) == (9, 3, 4, 1)
    assert not sampling.stop
    assert sampling.HasField("temperature")


async def test_the_first_of_n_completions_has_the_requests_seed_and_no_two_share_one(stack):
    seeds = []
    for seed, n in [(77, 1), (77, 3), (78, 3), (2**64 - 1, 16), (77, 3)]:
        stack.scheduler.submissions.clear()
        await stack.answer(sampling={"seed": seed, "n": n, "max_tokens": 1})
        seeds.append([s.sampling.seed for s in stack.scheduler.submissions])
    alone, three, others, many, again = seeds
    assert alone == three[:1] == [77]
    assert again == three
    assert len({*three, *others, *many}) == 3 + 3 + 16


async def test_a_stop_string_that_is_a_control_token_reaches_the_scheduler_as_a_token(stack):
    stack.scheduler.script = lambda _: Script(
        [*ids("hello"), END], common_pb2.FINISH_REASON_STOP, stop_token_id=END
    )
    sampling = {"stop": ["zzz", "<|end|>"], "stop_token_ids": [5], "max_tokens": 9}
    messages = await stack.answer(sampling=sampling)
    sampling = stack.scheduler.submissions[0].sampling
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == ([], [5, END])
    assert (text_of(messages), outputs(messages)[-1].stop) == ("hello", "<|end|>")


async def test_bad_words_reach_the_scheduler_as_tokens(stack):
    own = [{"ids": [7, 8]}]
    await stack.answer(sampling={"bad_words": ["hello"], "bad_token_ids": own, "max_tokens": 2})
    sampling = stack.scheduler.submissions[0].sampling
    assert not sampling.bad_words
    sequences = [list(sequence.ids) for sequence in sampling.bad_token_ids]
    assert sequences == [[7, 8], ids("hello"), ids(" hello")]


async def test_min_tokens_that_can_never_come_are_refused(stack):
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.min_tokens: .* can never come"):
        await stack.answer("hello", sampling={"min_tokens": 100_000})
    assert not stack.scheduler.submissions


async def test_max_tokens_that_are_not_given_are_all_that_fits(stack):
    stack.scheduler.script = says("hello")
    stack.scheduler.set_workers(worker(max_model_len=100), worker(worker_id="b", max_model_len=80))
    await stack.until(lambda: len(stack.router.pool.reports()) == 2)
    await stack.answer("hello", sampling={})
    assert stack.scheduler.submissions[0].sampling.max_tokens == 99


async def test_the_token_that_ends_a_request_counts_but_has_no_text(stack):
    stack.scheduler.script = lambda _: Script([*ids("hello"), END], common_pb2.FINISH_REASON_STOP)
    messages = await stack.answer()
    assert text_of(messages) == "hello"
    assert messages[-1].usage.completion_tokens == 2
    assert messages[-1].outputs[0].WhichOneof("matched_stop") is None
    kept = await stack.answer(keep_special_tokens=True)
    assert text_of(kept) == "hello<|end|>"


async def test_a_stop_token_is_told_and_shown_only_when_asked(stack):
    dot = ids(".")[0]
    stack.scheduler.script = lambda _: Script(
        ids("hello."), common_pb2.FINISH_REASON_STOP, stop_token_id=dot
    )
    messages = await stack.answer(sampling={"stop_token_ids": [dot]})
    assert (text_of(messages), outputs(messages)[-1].stop_token_id) == ("hello", dot)
    assert text_of(await stack.answer(include_stop_str_in_output=True)) == "hello."


@pytest.mark.parametrize(("includes", "shown"), [(False, "a"), (True, "a END")])
async def test_a_stop_string_ends_the_request_everywhere(stack, includes, shown):
    stack.scheduler.script = says("a END never shown " * 50)
    stack.scheduler.is_paced = False
    call = stack.generate(
        request_id="r", include_stop_str_in_output=includes, sampling={"stop": [" END"]}
    )
    await stack.until(lambda: stack.scheduler.live)
    stack.scheduler.step(len(ids("a END never")))
    messages = await stack.rest(call)
    last = outputs(messages)[-1]
    assert (text_of(messages), last.stop) == (shown, " END")
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert messages[-1].usage.completion_tokens == len(ids("a END"))
    assert [t for o in outputs(messages) for t in o.token_ids] == ids("a END")
    await stack.until(lambda: stack.scheduler.cancellations)
    assert stack.scheduler.cancellations == [("r", scheduler_pb2.CANCEL_REASON_STOP_STRING)]


async def test_a_stop_string_in_the_last_tokens_needs_no_cancelling(stack):
    stack.scheduler.script = says("a END")
    messages = await stack.answer(sampling={"stop": ["END"]})
    assert outputs(messages)[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert text_of(messages) == "a "


async def test_n_completions_share_a_stream(stack):
    texts = {"r#0": "hello", "r#1": "world", "r#2": "he"}
    stack.scheduler.script = lambda s: Script(ids(texts[s.request_id]))
    messages = await stack.answer(request_id="r", sampling={"n": 3, "seed": 7, "max_tokens": 20})
    assert [text_of(messages, index) for index in range(3)] == ["hello", "world", "he"]
    assert [s.request_id for s in stack.scheduler.submissions] == ["r#0", "r#1", "r#2"]
    usage = messages[-1].usage
    expected = sum(len(ids(text)) for text in ("hello", "world", "he"))
    assert (usage.prompt_tokens, usage.completion_tokens) == (1, expected)
    assert sum(o.finish_reason != 0 for m in messages for o in m.outputs) == 3


async def test_no_two_completions_of_a_request_arrive_at_once(stack):
    # Under policy priority, such a pair would take each other's KV blocks again and again.
    await stack.answer(sampling={"n": 4, "max_tokens": 2})
    arrivals = [s.arrival_time_unix_s for s in stack.scheduler.submissions]
    assert arrivals == sorted(set(arrivals))
    assert arrivals[-1] - arrivals[0] < 0.001


async def test_n_are_admitted_all_or_none():
    async with running_stack(max_queued_requests=3) as stack:
        error = await error_of(stack.generate(sampling={"n": 4}))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.n")
        assert not stack.scheduler.submissions


async def test_logprobs_pass_through_with_offsets_into_the_text(stack):
    stack.scheduler.script = says("hello w🎉")
    messages = await stack.answer(
        "hello", sampling={"logprobs": 0, "prompt_logprobs": 1}, echo=True
    )
    tokens = [t for o in outputs(messages) for t in o.logprobs]
    assert [t.token_id for t in tokens] == ids("hello w🎉")
    offsets = [offset for o in outputs(messages) for offset in o.text_offsets]
    assert offsets == [5, 10, 12, 12, 12]
    assert text_of(messages) == "hellohello w🎉"


async def test_what_came_at_once_is_sent_in_messages_that_clients_take(stack):
    stack.scheduler.set_workers(worker(max_model_len=10**6, num_kv_blocks=10**6))
    await stack.until(lambda: stack.router.pool.reports()[0].max_model_len == 10**6)
    stack.scheduler.tokens_per_step = 60_000
    stack.scheduler.script = lambda _: Script([65] * 60_000)
    sampling = {"max_tokens": 60_000, "logprobs": 0, "n": 2}
    messages = await stack.answer(sampling=sampling)
    for index in range(2):
        sizes = [len(output.token_ids) for output in outputs(messages, index)]
        assert (sum(sizes), max(sizes)) == (60_000, 2_048)
        assert len(text_of(messages, index)) == 60_000
        ends = [output.finish_reason for output in outputs(messages, index)]
        assert ends == [0] * (len(ends) - 1) + [common_pb2.FINISH_REASON_LENGTH]


async def test_prompt_logprobs_come_once_with_the_first_message(stack):
    stack.scheduler.script = says("hello world")
    messages = await stack.answer("hello.", sampling={"prompt_logprobs": 1})
    assert [len(m.prompt_logprobs) for m in messages] == [1] + [0] * (len(messages) - 1)


async def test_prompt_logprobs_are_asked_for_once(stack):
    stack.scheduler.script = says("hello world")
    messages = await stack.answer("hello.", sampling={"prompt_logprobs": 1, "n": 2})
    assert sum(len(m.prompt_logprobs) for m in messages) == 1
    asked = [s.sampling.HasField("prompt_logprobs") for s in stack.scheduler.submissions]
    assert asked == [True, False]


async def test_echo_shows_the_prompt_before_each_completion(stack):
    stack.scheduler.script = says(" world")
    messages = await stack.answer("hello", echo=True, sampling={"n": 2})
    assert [text_of(messages, index) for index in range(2)] == ["hello world"] * 2
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert text_of(await stack.answer(chat=chat, echo=True)) == "<|user|>hello<|assistant|> world"


async def test_prompts_come_as_text_ids_or_messages(stack):
    stack.scheduler.script = says("hello")
    await stack.answer("hello 🎉")
    await stack.answer(token_ids={"ids": [1, 2, 3]})
    chat = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False}
    await stack.answer(chat=chat)
    expected = [ids("hello 🎉"), [1, 2, 3], ids("<|user|>hello<|end|>")]
    prompts = [list(memoryview(s.prompt_token_ids).cast("i")) for s in stack.scheduler.submissions]
    assert prompts == expected


async def test_a_long_prompt_is_read_beside_the_event_loop(stack):
    stack.scheduler.script = says("hello")
    stack.scheduler.set_workers(worker(max_model_len=50_000, num_kv_blocks=10_000))
    await stack.until(lambda: stack.router.pool.reports()[0].max_model_len == 50_000)
    await stack.answer("hello world " * 2_000)
    assert len(stack.scheduler.submissions[0].prompt_token_ids) // 4 == len(
        ids("hello world " * 2_000)
    )


async def test_an_id_of_another_message_is_refused_while_it_lives_and_free_afterwards(stack):
    stack.scheduler.is_paced = False
    call = stack.generate(request_id="same")
    await stack.until(lambda: stack.scheduler.live)
    error = await error_of(stack.generate("another text", request_id="same"))
    assert (error.code, error.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
    )
    stack.scheduler.resume()
    assert [m async for m in call]
    await stack.until(lambda: stack.is_empty)
    assert await stack.answer(request_id="same")


async def test_ids_are_made_for_requests_without_one(stack):
    first, second = await stack.answer(), await stack.answer()
    assert first[0].request_id
    assert first[0].request_id != second[0].request_id


async def test_without_a_ready_worker_it_is_unavailable_with_a_time_to_retry():
    async with running_stack(worker_grace_s=0.0) as stack:
        stack.scheduler.set_workers(worker(state=common_pb2.WORKER_STATE_STARTING))
        await stack.until(lambda: not stack.router.pool.capacities(MODEL, stack.router.now()))
        error = await error_of(stack.generate())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_READY_WORKER")
        assert error.retry_after_s == 1.0


async def test_a_request_waits_for_the_next_worker_when_the_last_was_ready_a_moment_ago(stack):
    stack.scheduler.set_workers(worker(state=common_pb2.WORKER_STATE_STARTING))
    await stack.until(lambda: not stack.router.pool.ready(MODEL, stack.router.now()))
    call = stack.generate()
    await stack.until(lambda: stack.router.num_queued == 1)
    stack.scheduler.set_workers(worker())
    assert [message async for message in call]


async def test_a_full_queue_refuses_and_lets_in_again_later():
    async with running_stack(max_queued_requests=2, waiting_allowance=1) as stack:
        stack.scheduler.is_paced = False
        stack.scheduler.set_workers(worker(max_num_seqs=1))
        await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 1)
        calls = [stack.generate() for _ in range(4)]
        await stack.until(lambda: stack.router.num_queued == 2)
        assert stack.router.num_in_flight == 2
        error = await error_of(stack.generate())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_after_s is not None
        stack.scheduler.resume()
        for call in calls:
            assert [m async for m in call][-1].HasField("usage")
        assert await stack.answer()


async def test_a_fault_in_the_worker_is_the_requests_own(stack):
    stack.scheduler.script = says("he", reason=common_pb2.FINISH_REASON_ERROR, message="NaN")
    call = stack.generate()
    messages = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in call:
            messages.append(message)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "GENERATION_FAILED")
    assert "NaN" in error.message
    assert outputs(messages)[-1].finish_reason == common_pb2.FINISH_REASON_ERROR


async def test_models_and_pool_are_listed(stack):
    models = (await stack.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(m.name, m.max_model_len, m.num_ready_workers) for m in models] == [(MODEL, 4096, 1)]
    assert models[0].has_chat_template
    pool = await stack.stub.GetPool(inference_pb2.GetPoolRequest())
    assert [w.worker_id for w in pool.workers] == ["worker-0"]
    assert (pool.num_queued, pool.num_in_flight) == (0, 0)


async def test_explain_asks_the_scheduler_that_had_it(stack):
    await stack.answer(request_id="r")
    account = await stack.stub.Explain(inference_pb2.ExplainRequest(request_id="r"))
    assert account.cached_tokens == 7
    await stack.answer(request_id="several", sampling={"n": 2, "max_tokens": 4})
    account = await stack.stub.Explain(inference_pb2.ExplainRequest(request_id="several"))
    assert account.request_id == "several#0"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.Explain(inference_pb2.ExplainRequest(request_id="never"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_what_is_not_served_yet_says_so(stack):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.GetStatus(inference_pb2.GetStatusRequest(request_id="r"))
    assert from_rpc_error(caught.value).reason == "NO_STATUS_STORE"
