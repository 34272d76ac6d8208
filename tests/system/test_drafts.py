"""Scheduling core and model runner over their wires: drafts change the steps, not the tokens."""

from pathlib import Path

import numpy as np
import pytest
import transformers

from gpuworker.rpc import wire as worker_wire
from gpuworker.runner import ModelRunner
from headrace.v1 import common_pb2
from scheduler.build import core_config
from scheduler.config import SchedulerSettings
from scheduler.core.plan import NewRequest
from scheduler.core.scheduler import SchedulerCore
from scheduler.rpc import wire as scheduler_wire
from scheduler.worker import WorkerSpec
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint
from tests.scheduler.core.building import check_book

NUM_REQUESTS = 12
MAX_TOKENS = 48
# Few tokens to choose from, so that outputs repeat themselves and drafts come true.
FAVOURITES = {7: 8.0, 11: 8.0, 13: 8.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [np.tile(rng.integers(6, 60, 5), 4).astype(np.int32) for _ in range(NUM_REQUESTS)]


def core_for(runner: ModelRunner) -> SchedulerCore:
    limits = runner.limits
    info = WorkerSpec(
        worker_id="w",
        incarnation="1",
        model="m",
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks - 1,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=64,
        vocab_size=limits.vocab_size,
        num_spec_tokens=runner.num_spec_tokens,
    )
    return SchedulerCore(core_config(info, SchedulerSettings()))


def serve_all(runner: ModelRunner) -> tuple[dict[int, list[int]], int, int]:
    """Tokens of every request by its key, turns they took in all, preemptions."""
    core = core_for(runner)
    samplings = {}
    for key, prompt in enumerate(prompts()):
        samplings[key] = common_pb2.SamplingParams(
            temperature=float(key % 2), seed=key, max_tokens=MAX_TOKENS, logit_bias=FAVOURITES
        )
        core.add_request(
            NewRequest(
                key=key,
                request_id=f"r{key}",
                prompt_token_ids=prompt,
                max_tokens=MAX_TOKENS,
                arrival_time=float(key),
            ),
            0.0,
        )
    tokens: dict[int, list[int]] = {key: [] for key in samplings}
    num_turns = num_preemptions = 0
    while core.has_unfinished:
        plan = core.schedule(0.0)
        num_preemptions += len(plan.preempted_keys)
        placed = [samplings[request.key] for request in plan.row_requests]
        message = scheduler_wire.plan_message(plan, placed, "")
        result = runner.execute(worker_wire.step_plan(message))
        answer = scheduler_wire.worker_result(worker_wire.step_result(result))
        output = core.update(answer.step, 0.0)
        starts = np.cumsum(output.num_new_tokens) - output.num_new_tokens
        for key, start, count in zip(
            output.keys.tolist(), starts.tolist(), output.num_new_tokens.tolist(), strict=True
        ):
            tokens[key] += output.token_ids[start : start + count].tolist()
        num_turns += plan.num_reqs
    check_book(core)
    assert core.num_free_blocks == runner.limits.num_kv_blocks - 1
    return tokens, num_turns, num_preemptions


def test_drafts_give_the_same_tokens_in_fewer_turns(checkpoint: Path) -> None:
    plain, num_plain_turns, _ = serve_all(make_runner(checkpoint))
    drafted, num_turns, _ = serve_all(make_runner(checkpoint, num_spec_tokens=3))
    assert drafted == plain
    assert all(len(tokens) == MAX_TOKENS for tokens in drafted.values())
    assert num_turns < 0.8 * num_plain_turns, f"{num_turns} of {num_plain_turns}"


def test_drafts_survive_preemption(checkpoint: Path) -> None:
    plain, _, _ = serve_all(make_runner(checkpoint))
    small = make_runner(checkpoint, num_kv_blocks=22, num_spec_tokens=3)
    drafted, _, num_preemptions = serve_all(small)
    assert num_preemptions > 0
    assert drafted == plain
