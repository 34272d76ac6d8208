"""A request is refused exactly when the core could not carry it to its end, alone."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from router.core.admission import Admit, Ask, Capacity, fits
from scheduler.core.plan import NewRequest, RequestStatus, SchedulerConfig, StepPlan, StepResult
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import check_book

TOKEN = 7


@st.composite
def configs(draw):
    num_spec_tokens = draw(st.sampled_from([0, 0, 0, 1, 3, 20]))
    return SchedulerConfig(
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        num_gpu_blocks=draw(st.integers(2, 12)),
        max_model_len=draw(st.integers(2, 60)),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 16, 64])),
        max_num_seqs=draw(st.integers(1, 3)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 7])),
        enable_chunked_prefill=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.5, 0.99])),
        reserve_full_sequence=draw(st.booleans()),
        num_spec_tokens=num_spec_tokens,
        spec_kind=draw(st.sampled_from(["ngram", "draft", "eagle"])) if num_spec_tokens else None,
        pipeline_depth=draw(st.sampled_from([1, 2, 3])),
    )


def config_of(**fields):
    limits = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return SchedulerConfig(**(limits | fields))


def edges(config):
    """Prompt lengths around every limit."""
    num_slots = (config.num_gpu_blocks - 1) * config.block_size
    limits = {num_slots, num_slots - config.num_spec_tokens, config.max_model_len, 1}
    near = {limit + by for limit in limits for by in (-config.block_size, -2, -1, 0, 1, 2)}
    return sorted(n for n in near if 1 <= n <= max(num_slots, config.max_model_len) + 2)


class Run:
    """A core with one request, and a worker that accepts some of its own drafts."""

    def __init__(self, config, num_prompt_tokens, max_tokens, num_accepted):
        self.core = SchedulerCore(config)
        self.num_accepted = num_accepted
        self.flights: list[StepPlan] = []
        self.num_outputs = 0
        self.finished = ()
        prompt = np.arange(num_prompt_tokens, dtype=np.int32)
        request = NewRequest(key=0, request_id="r", prompt_token_ids=prompt, max_tokens=max_tokens)
        self.core.add_request(request, 0.0)

    def steps(self, count):
        """Plan as far ahead as the pipeline allows, and answer; stops when the request ended."""
        for _ in range(count):
            if self.finished:
                return
            self.flights.append(self.core.schedule(0.0))
            if len(self.flights) == self.core.config.pipeline_depth:
                self.answer(self.flights.pop(0))
            check_book(self.core)

    def answer(self, plan):
        num_rows = plan.num_reqs
        is_chunk = self.core.state.flights[0].is_prefill_chunk if num_rows else np.empty(0, bool)
        drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros(num_rows, int)
        counts = np.where(is_chunk, 0, 1 + np.minimum(drafts, self.num_accepted)).astype(np.int32)
        proposed = np.where(is_chunk, 0, self.core.config.num_spec_tokens).astype(np.int32)
        result = StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=counts,
            token_ids=np.full(counts.sum(), TOKEN, np.int32),
            num_draft_tokens=proposed,
            draft_token_ids=np.full(proposed.sum(), TOKEN, np.int32),
        )
        output = self.core.update(result, 0.0)
        self.num_outputs += len(output.token_ids)
        self.finished = output.finished


@given(configs(), st.data())
@example(config_of(num_gpu_blocks=9, max_model_len=512), 113)
@example(config_of(num_gpu_blocks=2, max_model_len=512), 16)
@example(config_of(num_gpu_blocks=9, max_model_len=128), 127)
def test_what_is_taken_runs_to_its_end_and_what_is_refused_could_not(config, data):
    num_prompt_tokens, max_tokens, num_accepted = data, 1000, 0
    if not isinstance(data, int):
        num_prompt_tokens = data.draw(st.sampled_from(edges(config)))
        max_tokens = data.draw(st.sampled_from([1, 2, 5, 1000]))
        num_accepted = data.draw(st.sampled_from([0, 1, 20]))
    refusal = SchedulerCore(config).refusal(num_prompt_tokens, max_tokens)
    if num_prompt_tokens >= config.max_model_len:
        # The model's positions end there: no token of output would fit.
        assert refusal is not None
        return
    run = Run(config, num_prompt_tokens, max_tokens, num_accepted)
    if refusal is not None:
        run.steps(200)
        assert (run.num_outputs, run.finished) == (0, ()), "what was refused can be served"
        return
    run.steps(20_000)
    (finished,) = run.finished
    assert finished.status is RequestStatus.LENGTH_CAPPED
    assert run.num_outputs == min(max_tokens, config.max_num_tokens - num_prompt_tokens)
    if not config.num_spec_tokens and config.pipeline_depth <= 2:
        assert not finished.num_preemptions, "a lone request was preempted for its own blocks"


@given(configs(), st.data())
def test_the_router_lets_in_what_the_core_carries_to_its_end(config, data):
    """Services never use draft models, which alone need slots ahead."""
    num_prompt_tokens = data.draw(st.sampled_from(edges(config)))
    max_tokens = data.draw(st.integers(1, 70))
    capacity = Capacity(config.max_model_len, config.num_gpu_blocks - 1, config.block_size)
    if config.num_lookahead_tokens:
        return
    core = SchedulerCore(config)
    verdict = fits(Ask(num_prompt_tokens=num_prompt_tokens), [capacity])
    assert isinstance(verdict, Admit) == (core.refusal(num_prompt_tokens, 1) is None)
    if isinstance(verdict, Admit):
        # All that the router promises is what the core generates.
        assert verdict.max_tokens == config.max_num_tokens - num_prompt_tokens
        ask = Ask(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        assert isinstance(fits(ask, [capacity]), Admit) == (max_tokens <= verdict.max_tokens)
