"""The runner on a tiny model: company, preemption, drafts, log probabilities, failures."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from gpuworker.core.plan import ExecutedStep, PlanError, ReceivedPlan, SamplingSettings
from gpuworker.runner import ModelRunner
from tests.gpuworker.driver import GREEDY, Driver, int32
from tests.gpuworker.sampling.chi_square import assert_follows
from tests.gpuworker.tiny import LLAMA, VOCAB_SIZE, make_runner, save_checkpoint

SAMPLED = SamplingSettings(temperature=1.1, top_p=0.95, seed=2**63 + 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    # Depths above 1024, where oneDNN treats one row and many differently.
    save_checkpoint(folder, transformers.LlamaConfig(**(LLAMA | {"intermediate_size": 1536})))
    return folder


@pytest.fixture(scope="module")
def shared_runner(checkpoint: Path) -> ModelRunner:
    return make_runner(checkpoint, num_kv_blocks=300)


@pytest.fixture
def driver(shared_runner: ModelRunner) -> Driver:
    shared_runner.reset()
    return Driver(shared_runner)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, VOCAB_SIZE, n).tolist() for n in rng.integers(1, 60, count)]


def settings(i: int) -> SamplingSettings:
    """Greedy and sampled, with and without what a request may ask for."""
    sequences = tuple((token, (token * 7 + i) % VOCAB_SIZE) for token in range(6, VOCAB_SIZE))
    kinds = (
        GREEDY,
        replace(SAMPLED, seed=i),
        SamplingSettings(temperature=0.7, seed=i),
        SamplingSettings(temperature=1.5, top_k=5, seed=i, frequency_penalty=0.5),
        SamplingSettings(temperature=0.0, repetition_penalty=1.2),
        SamplingSettings(temperature=1.0, min_p=0.02, seed=i, min_tokens=4),
        SamplingSettings(temperature=0.9, seed=i, bad_token_ids=((9,), *sequences), num_logprobs=2),
        SamplingSettings(temperature=0.0, bad_token_ids=sequences, repetition_penalty=1.1),
        SamplingSettings(
            temperature=1.2, top_p=0.8, top_k=60, min_p=0.01, seed=i, presence_penalty=1.0,
            min_tokens=6, stop_token_ids=tuple(range(6, 60)), num_logprobs=0,
        ),
        SamplingSettings(
            temperature=0.0, logit_bias=((7, 3.0), (50, -100.0)), num_logprobs=5,
            num_prompt_logprobs=1,
        ),
    )  # fmt: skip
    return kinds[i % len(kinds)]


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_32_requests_with_preemptions_give_what_each_gives_alone(
    checkpoint: Path, attention: str
) -> None:
    driver = Driver(make_runner(checkpoint, num_kv_blocks=300, attention=attention))
    num_output = 12
    alone, logprobs_alone = [], []
    for i, tokens in enumerate(prompts(32)):
        driver.add(0, tokens, settings(i))
        logprobs: list[list[float]] = []
        while len(driver.requests[0].output) < num_output:
            request = driver.requests[0]
            result = driver.step({0: len(request.tokens) - request.num_computed_tokens})
            logprobs += sampled_logprobs(result).get(0, [])
        alone.append(driver.free(0).output)
        logprobs_alone.append(logprobs)

    rng = np.random.default_rng(1)
    waiting = list(enumerate(prompts(32)))
    outputs: dict[int, list[int]] = {}
    logprobs_together: dict[int, list[list[float]]] = {i: [] for i in range(32)}
    index_by_row: dict[int, int] = {}
    num_preemptions = 0
    while waiting or index_by_row:
        while waiting and len(index_by_row) < 10:
            i, tokens = waiting.pop(0)
            row = next(r for r in range(12) if r not in index_by_row)
            driver.add(row, tokens, settings(i), output=outputs.get(i, ()))
            index_by_row[row] = i
        scheduled = {}
        for row in rng.permutation(list(index_by_row)).tolist():
            request = driver.requests[row]
            left = len(request.tokens) - request.num_computed_tokens
            scheduled[row] = min(left, int(rng.integers(1, 40)))
        told = sampled_logprobs(driver.step(scheduled))
        for row, i in list(index_by_row.items()):
            logprobs_together[i] += told.get(row, [])
            outputs[i] = driver.requests[row].output
            is_done = len(outputs[i]) >= num_output
            if is_done or rng.random() < 0.1:
                old = driver.free(row)
                del index_by_row[row]
                if not is_done:
                    num_preemptions += 1
                    waiting.insert(0, (i, old.tokens[: old.num_prompt_tokens]))
    assert num_preemptions > 10
    assert [outputs[i][:num_output] for i in range(32)] == alone
    assert list(logprobs_together.values()) == logprobs_alone
    assert sum(map(len, logprobs_alone)) == num_output * sum(
        settings(i).num_logprobs is not None for i in range(32)
    )


def sampled_logprobs(result: ExecutedStep) -> dict[int, list[list[float]]]:
    """Of each row that asked: those of its tokens and of the likeliest ones, to the last bit."""
    return {
        row.row: np.column_stack((row.tokens.logprobs, row.tokens.top_logprobs)).tolist()
        for row in result.logprobs
        if row.tokens is not None
    }


def test_a_first_chunk_samples_nothing(driver: Driver) -> None:
    driver.add(3, prompts(1)[0] * 2)
    result = driver.step({3: 4})
    assert result.num_sampled_tokens.tolist() == [0]
    assert result.token_ids.tolist() == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_drafts_change_nothing_but_the_number_of_steps(
    driver: Driver, sampling: SamplingSettings
) -> None:
    prompt = prompts(1, seed=3)[0]
    driver.add(0, prompt, sampling)
    expected = driver.finish(0, 14)
    driver.free(0)

    request = driver.add(1, prompt, sampling)
    driver.step({1: len(prompt)})
    wrong = [(token + 1) % VOCAB_SIZE for token in expected]
    assert len(request.output) == 1
    result = driver.step({1: 1}, {1: expected[1:4]})  # all right
    assert result.num_sampled_tokens.tolist() == [4]
    result = driver.step({1: 1}, {1: [*expected[5:7], wrong[7], expected[8]]})  # two right
    assert result.num_sampled_tokens.tolist() == [3]
    result = driver.step({1: 1}, {1: [wrong[8], expected[9]]})  # none right
    assert result.num_sampled_tokens.tolist() == [1]
    result = driver.step({1: 1}, {1: [-1, -1]})  # placeholders
    assert result.num_sampled_tokens.tolist() == [1]
    assert driver.finish(1, 14) == expected


def test_draft_rows_share_a_batch_with_decodes_and_chunks(driver: Driver) -> None:
    first, second = prompts(2, seed=4)
    driver.add(0, first, GREEDY)
    expected = driver.finish(0, 6)
    driver.free(0)
    driver.add(1, first, GREEDY)
    driver.add(2, second, SAMPLED)
    driver.step({1: len(first)})
    driver.step({2: len(second) - 1, 1: 1}, {1: expected[1:4]})
    driver.step({1: 1, 2: 1}, {1: [0]})
    assert driver.requests[1].output[:6] == expected
    assert len(driver.requests[2].output) == 1


# Three tokens only, so that the output repeats itself.
FEW_TOKENS = ((9, 100.0), (20, 100.0), (33, 100.0))


@pytest.mark.parametrize(
    "sampling",
    [replace(GREEDY, logit_bias=FEW_TOKENS), replace(SAMPLED, logit_bias=FEW_TOKENS)],
)
def test_its_own_drafts_give_the_same_tokens_in_fewer_steps(
    driver: Driver, checkpoint: Path, sampling: SamplingSettings
) -> None:
    prompt = prompts(1, seed=3)[0] * 2
    driver.add(0, prompt, sampling)
    expected = driver.finish(0, 60)

    drafting = Driver(make_runner(checkpoint, num_spec_tokens=3))
    request = drafting.add(4, prompt, sampling)
    drafts: list[int] = []
    scheduled, num_steps = len(prompt), 0
    while len(request.output) < 60:
        result = drafting.step({4: scheduled}, {4: drafts} if drafts else None)
        drafts = result.draft_token_ids.tolist()
        assert result.num_draft_tokens.tolist() == [len(drafts)]
        assert len(drafts) <= 3
        scheduled, num_steps = 1, num_steps + 1
    assert request.output[:60] == expected
    assert num_steps < 48


def test_what_is_sampled_behind_a_draft_follows_the_models_distribution(driver: Driver) -> None:
    """At a draft's place and behind it; a wrong draft must not colour what comes instead."""
    prompt = prompts(1, seed=3)[0]
    few = replace(SAMPLED, top_p=1.0, logit_bias=FEW_TOKENS)
    draft = FEW_TOKENS[1][0]

    def distribution(tokens: list[int]) -> np.ndarray:
        """Over the vocabulary, from the model's own log probabilities and the three biases."""
        driver.add(0, tokens, replace(few, num_logprobs=VOCAB_SIZE))
        columns = driver.step({0: len(tokens)}).logprobs[0].tokens
        driver.free(0)
        assert columns is not None
        weights = np.zeros(VOCAB_SIZE)
        weights[columns.top_token_ids[0]] = np.exp(columns.top_logprobs[0] / few.temperature)
        weights[[t for t in range(VOCAB_SIZE) if t not in dict(FEW_TOKENS)]] = 0
        return weights / weights.sum()

    first, second = distribution(prompt), distribution([*prompt, draft])
    at_draft, behind = [], []
    for start in range(0, 2000, 40):
        for row in range(40):
            driver.add(row, prompt[:8] if row % 2 else prompt, replace(few, seed=start + row))
        scheduled = {row: len(driver.requests[row].tokens) for row in range(40)}
        driver.step(scheduled, {row: [draft] for row in range(0, 40, 2)})
        for row in range(40):
            output = driver.free(row).output
            if row % 2 == 0:
                at_draft.append(output[0])
                behind += output[1:]
    assert_follows(at_draft, first)
    assert_follows(behind, second)
    assert len(behind) == at_draft.count(draft) > 100


def test_drafts_end_before_max_model_len(checkpoint: Path) -> None:
    driver = Driver(make_runner(checkpoint, num_spec_tokens=4))
    driver.add(0, [9, 8, 7] * 170)
    driver.add(1, [5, 6])
    result = driver.step({0: 510, 1: 1})
    assert result.num_draft_tokens.tolist() == [0, 0]
    assert result.num_sampled_tokens.tolist() == [1, 0]


def test_penalties_see_accepted_drafts_then_and_later(driver: Driver) -> None:
    # Few tokens, so that what came before decides which of them is next.
    sampling = SamplingSettings(
        temperature=0.0, frequency_penalty=1.9, presence_penalty=0.3, logit_bias=FEW_TOKENS
    )
    prompt = prompts(1, seed=6)[0]
    driver.add(0, prompt, sampling)
    expected = driver.finish(0, 20)
    driver.free(0)
    driver.add(0, prompt, sampling)
    driver.step({0: len(prompt)})
    result = driver.step({0: 1}, {0: [*expected[1:7], -1]})
    assert result.num_sampled_tokens.tolist() == [7]
    assert driver.requests[0].output == expected[:8]
    assert driver.finish(0, 20) == expected


def test_bad_words_never_come_out_with_and_without_drafts(driver: Driver) -> None:
    prompt = prompts(1, seed=6)[0]
    driver.add(0, prompt, GREEDY)
    plain = driver.finish(0, 12)
    driver.free(0)
    bad = (tuple(plain[2:4]), (plain[6],))
    sampling = replace(GREEDY, bad_token_ids=bad)
    driver.add(0, prompt, sampling)
    expected = driver.finish(0, 12)
    driver.free(0)
    pairs = list(pairwise(expected))
    assert bad[0] not in pairs
    assert plain[6] not in expected
    assert expected[:3] == plain[:3]

    request = driver.add(0, prompt, sampling)
    driver.step({0: len(prompt)})
    result = driver.step({0: 1}, {0: plain[1:5]})
    assert result.num_sampled_tokens.tolist() == [3]  # the draft that completes it is refused
    driver.step({0: 1}, {0: expected[4:9]})
    assert request.output == expected[: len(request.output)]
    assert len(request.output) > 8


def test_logprobs_are_of_the_models_own_distribution(driver: Driver) -> None:
    sampling = SamplingSettings(temperature=0.0, num_logprobs=3, logit_bias=((9, 100.0),))
    driver.add(0, prompts(1)[0], sampling)
    driver.add(1, prompts(1)[0], replace(GREEDY, num_logprobs=0))
    n = len(prompts(1)[0])
    result = driver.step({0: n, 1: n})
    biased, plain = (row.tokens for row in result.logprobs)
    assert biased is not None
    assert plain is not None
    assert biased.token_ids.tolist() == [9]
    assert biased.ranks[0] > 1
    assert biased.top_token_ids.shape == (1, 3)
    assert plain.top_token_ids.shape == (1, 0)
    assert plain.ranks.tolist() == [1]
    assert plain.token_ids[0] == biased.top_token_ids[0, 0]
    assert plain.logprobs[0] == biased.top_logprobs[0, 0]
    assert biased.logprobs[0] < biased.top_logprobs[0, 2]


def test_prompt_logprobs_come_with_the_chunks_that_computed_them(driver: Driver) -> None:
    prompt = prompts(1, seed=8)[0]
    sampling = replace(GREEDY, num_prompt_logprobs=2)
    driver.add(0, prompt, sampling)
    whole = driver.step({0: len(prompt)}).logprobs[0].prompt_tokens
    assert whole is not None
    assert whole.token_ids.tolist() == prompt[1:]
    driver.add(1, prompt, sampling)
    parts = [driver.step({1: 5}), driver.step({1: len(prompt) - 5})]
    pieces = [part.logprobs[0].prompt_tokens for part in parts]
    assert np.concatenate([p.token_ids for p in pieces if p]).tolist() == prompt[1:]
    assert np.concatenate([p.logprobs for p in pieces if p]).tolist() == whole.logprobs.tolist()
    assert not driver.step({0: 1, 1: 1}).logprobs


def test_logits_that_are_not_finite_fail_only_their_row(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(checkpoint)
    driver = Driver(runner)
    first, second = prompts(2, seed=9)
    driver.add(0, first)
    expected = driver.finish(0, 3)
    driver.free(0)
    driver.add(1, first)
    driver.add(2, second)
    driver.step({1: len(first), 2: len(second)})
    # What a broken kernel or weight would do: one request's cache turns to NaN.
    for layer in runner.forward.kv:
        layer.value[driver.requests[2].blocks[0]] = torch.nan
    result = driver.step({1: 1, 2: 1})
    assert [(error.row, "not finite" in error.message) for error in result.errors] == [(2, True)]
    assert result.num_sampled_tokens.tolist() == [1, 0]
    # A scheduler that plans ahead has sent the next plan by now.
    driver.requests[2].num_computed_tokens = len(second) + 1
    result = driver.step({1: 1, 2: 1})
    assert result.num_sampled_tokens.tolist() == [1, 0]
    driver.free(2)
    assert driver.finish(1, 3) == expected


def test_an_empty_plan_gives_an_empty_result(driver: Driver) -> None:
    result = driver.step({})
    assert result.step_id == 0
    assert result.num_sampled_tokens.tolist() == []


def test_rows_are_given_only_to_a_plan_that_asks(driver: Driver) -> None:
    request = driver.add(3, prompts(1)[0])
    assert driver.step({3: len(request.tokens)}).audit is None
    empty = driver.runner.execute(ReceivedPlan(step_id=1, wants_audit=True)).audit
    assert empty is not None
    assert (empty.rows.tolist(), empty.block_ids.tolist()) == ([3], request.blocks)


def test_a_reset_runner_has_no_rows(driver: Driver) -> None:
    driver.add(0, prompts(1)[0])
    driver.step({0: 1})
    driver.runner.reset()
    plan = ReceivedPlan(
        step_id=1,
        rows=int32(0),
        num_computed_tokens=int32(1),
        num_scheduled_tokens=int32(1),
    )
    with pytest.raises(PlanError, match="row 0 is empty"):
        driver.runner.execute(plan)


def test_eight_bit_keys_and_values_change_what_is_likely_only_a_little(checkpoint: Path) -> None:
    every_token = SamplingSettings(temperature=0.0, num_logprobs=VOCAB_SIZE)
    prompt = prompts(1, seed=5)[0] * 3
    by_dtype = {}
    for kv_dtype in (torch.float32, torch.float8_e4m3fn):
        driver = Driver(make_runner(checkpoint, attention="torch", kv_dtype=kv_dtype))
        driver.add(0, prompt, every_token)
        columns = driver.step({0: len(prompt)}).logprobs[0].tokens
        logprobs = np.empty(VOCAB_SIZE)
        logprobs[columns.top_token_ids[0]] = columns.top_logprobs[0]
        by_dtype[kv_dtype] = logprobs
    wide, narrow = by_dtype.values()
    distance = np.abs(wide - narrow).max()
    assert 0 < distance < 0.1, f"log probabilities differ by {distance}"
