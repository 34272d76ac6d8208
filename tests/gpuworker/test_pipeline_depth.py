"""The next step is launched before the last is finished: nothing changes but the waiting."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from gpuworker.core.plan import SamplingSettings
from tests.gpuworker.driver import GREEDY, UNKNOWN, Driver, Request
from tests.gpuworker.late import LateTransfers, late_parts
from tests.gpuworker.test_runner import SAMPLED, prompts, settings
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint

PENALIZED = SamplingSettings(
    temperature=0.8, seed=4, frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.1
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


def late_driver(checkpoint: Path, num_kv_blocks: int = 300) -> tuple[Driver, LateTransfers]:
    parts = late_parts()
    return Driver(
        make_runner(checkpoint, num_kv_blocks=num_kv_blocks, parts=parts)
    ), parts.transfers


def pipelined(driver: Driver, row: int, num_output: int) -> list[int]:
    """One row to its end, always one step ahead of what is known."""
    request = driver.requests[row]
    while len(request.output) < num_output:
        driver.launch({row: len(request.tokens) - request.num_computed_tokens})
        if driver.num_launched == 2:
            driver.finish_oldest()
    while driver.num_launched:
        driver.finish_oldest()
    return request.output[:num_output]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "drawn", "penalized"]
)
def test_steps_launched_ahead_give_the_same_tokens(
    checkpoint: Path, sampling: SamplingSettings
) -> None:
    prompt = prompts(1, seed=3)[0]
    plain = Driver(make_runner(checkpoint))
    plain.add(0, prompt, sampling)
    expected = plain.finish(0, 30)

    driver, _ = late_driver(checkpoint)
    driver.add(5, prompt, sampling)
    assert pipelined(driver, 5, 30) == expected
    held = driver.runner._rows.token_ids[5, len(prompt) : len(prompt) + 30]
    assert held.tolist() == expected


def test_launching_waits_for_nothing(checkpoint: Path) -> None:
    driver, transfers = late_driver(checkpoint)
    sampling = replace(PENALIZED, num_logprobs=2, num_prompt_logprobs=1, logit_bias=((7, 1.0),))
    prompt = prompts(1)[0]
    driver.add(0, prompt, sampling)
    first = driver.launch({0: len(prompt)})
    driver.launch({0: 1})
    assert transfers.num_waits == 0
    assert not first.is_done
    assert driver.finish_oldest().logprobs[0].tokens is not None
    assert first.is_done
    assert transfers.num_waits == 1


def test_a_third_step_waits_for_the_first_alone(checkpoint: Path) -> None:
    """Two tokens of a row would be unknown, and the device keeps the last."""
    prompt = prompts(1)[0]
    plain = Driver(make_runner(checkpoint))
    plain.add(0, prompt, GREEDY)
    driver, transfers = late_driver(checkpoint)
    driver.add(0, prompt, GREEDY)
    steps = [driver.launch({0: count}) for count in (len(prompt), 1, 1)]
    assert [step.is_done for step in steps] == [True, False, False]
    assert transfers.num_waits == 1
    while driver.num_launched:
        driver.finish_oldest()
    assert driver.requests[0].output == plain.finish(0, 3)


def test_32_requests_a_step_ahead_with_preemptions_give_what_each_gives_alone(
    checkpoint: Path,
) -> None:
    num_output = 12
    plain = Driver(make_runner(checkpoint, num_kv_blocks=300))
    alone = []
    for i, tokens in enumerate(prompts(32)):
        plain.add(0, tokens, settings(i))
        alone.append(plain.finish(0, num_output))
        plain.free(0)

    driver, _ = late_driver(checkpoint)
    rng = np.random.default_rng(1)
    waiting = list(enumerate(prompts(32)))
    outputs: dict[int, list[int]] = {}
    index_by_row: dict[int, int] = {}
    num_preemptions = num_handed_over = 0
    leaving: list[tuple[int, Request, bool]] = []
    while waiting or index_by_row or leaving:
        while waiting and len(index_by_row) < 10:
            i, tokens = waiting.pop(0)
            row = next(r for r in range(10) if r not in index_by_row)
            num_handed_over += row in driver.rows_launched()
            driver.add(row, tokens, settings(i), output=outputs.get(i, ()))
            index_by_row[row] = i
        driver.launch(scheduled_at_random(driver, index_by_row, rng))
        # Who leaves now has a token on its way, and another takes the row at once.
        gone = []
        for row, i in list(index_by_row.items()):
            request = driver.requests[row]
            is_done = len(request.output) >= num_output
            if is_done or rng.random() < 0.1:
                driver.free(row)
                del index_by_row[row]
                gone.append((i, request, is_done))
        if driver.num_launched == 2 or not index_by_row:
            driver.finish_oldest()
        leaving += gone
        for entry in list(leaving):
            i, request, is_done = entry
            if UNKNOWN in request.tokens:
                continue
            leaving.remove(entry)
            outputs[i] = request.output
            if not is_done:
                num_preemptions += 1
                waiting.insert(0, (i, request.tokens[: request.num_prompt_tokens]))
    assert num_preemptions > 10
    assert num_handed_over > 10
    assert [outputs[i][:num_output] for i in range(32)] == alone


def scheduled_at_random(
    driver: Driver, index_by_row: Mapping[int, int], rng: np.random.Generator
) -> dict[int, int]:
    scheduled = {}
    for row in rng.permutation(list(index_by_row)).tolist():
        request = driver.requests[row]
        left = len(request.tokens) - request.num_computed_tokens
        scheduled[row] = min(left, int(rng.integers(1, 40)))
    return scheduled


def test_bad_words_that_look_back_wait_for_the_token_before(checkpoint: Path) -> None:
    prompt = prompts(1, seed=6)[0]
    plain = Driver(make_runner(checkpoint))
    plain.add(0, prompt)
    first = plain.finish(0, 12)
    plain.free(0)
    sampling = replace(GREEDY, bad_token_ids=(tuple(first[3:5]), tuple(first[7:9])))
    plain.add(0, prompt, sampling)
    expected = plain.finish(0, 12)
    assert expected != first

    driver, _ = late_driver(checkpoint)
    driver.add(0, prompt, sampling)
    assert pipelined(driver, 0, 12) == expected


def test_a_row_that_changes_hands_does_not_get_the_old_requests_token(checkpoint: Path) -> None:
    first, second = prompts(2, seed=7)
    plain = Driver(make_runner(checkpoint))
    plain.add(0, second, SAMPLED)
    expected = plain.finish(0, 6)

    driver, _ = late_driver(checkpoint)
    old = driver.add(0, first, GREEDY)
    driver.launch({0: len(first)})
    driver.free(0)
    new = driver.add(0, second, SAMPLED)
    driver.launch({0: len(second) - 1})
    driver.finish_oldest()
    assert len(old.output) == 1
    assert pipelined(driver, 0, 6) == expected
    held = driver.runner._rows.token_ids[0, : len(second)]
    assert held.tolist() == second
    assert new.output[:6] == expected


def test_an_audit_gives_the_rows_of_its_own_step_not_of_the_one_launched_behind_it(
    checkpoint: Path,
) -> None:
    driver, _ = late_driver(checkpoint)
    (prompt,) = prompts(1)
    request = driver.add(0, prompt)
    driver.wants_audit = True
    driver.launch({0: len(prompt)})
    blocks = list(request.blocks)
    driver.wants_audit = False
    driver.free(0)
    driver.add(1, prompt)
    driver.launch({1: len(prompt)})
    audit = driver.finish_oldest().audit
    assert audit is not None
    assert (audit.rows.tolist(), audit.block_ids.tolist()) == ([0], blocks)
    assert driver.finish_oldest().audit is None


def test_a_failed_row_stays_failed_in_the_step_that_was_launched_ahead(checkpoint: Path) -> None:
    driver, _ = late_driver(checkpoint)
    first, second = prompts(2, seed=9)
    driver.add(1, first)
    driver.add(2, second)
    driver.launch({1: len(first), 2: len(second)})
    for layer in driver.runner.forward.kv:
        layer.value[driver.requests[2].blocks[0]] = torch.nan
    steps = [driver.runner.launch(driver._plan({1: 1, 2: 1}, {}))]
    driver.finish_oldest()
    for request in driver.requests.values():
        request.num_computed_tokens += 1
        request.tokens.append(UNKNOWN)
    steps.append(driver.runner.launch(driver._plan({1: 1, 2: 1}, {})))
    for step in steps:
        result = step.finish()
        assert result.num_sampled_tokens.tolist() == [1, 0]
        assert [error.row for error in result.errors] == [2]


def test_a_step_with_drafts_is_finished_before_the_next_is_launched(checkpoint: Path) -> None:
    prompt = prompts(1, seed=3)[0]
    plain = Driver(make_runner(checkpoint))
    plain.add(0, prompt, PENALIZED)
    expected = plain.finish(0, 9)

    driver, transfers = late_driver(checkpoint)
    request = driver.add(0, prompt, PENALIZED)
    driver.launch({0: len(prompt)})
    driver.finish_oldest()
    step = driver.runner.launch(driver._plan({0: 1}, {0: [expected[1], expected[2], 0]}))
    request.tokens += expected[1:4]
    request.num_computed_tokens += 3
    num_waits = transfers.num_waits
    driver.launch({0: 1})
    assert transfers.num_waits == num_waits + 1
    assert step.finish().token_ids.tolist() == expected[1:4]
    driver.finish_oldest()
    assert pipelined(driver, 0, 9) == expected
