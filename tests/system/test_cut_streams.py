"""Streams of real services whose connection is cut again and again give what whole ones give."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.client import HeadraceClient, ResumePolicy, Sampling, gather
from headrace.local import LocalConfig, local_pool
from headrace.types import Completion, Delta
from headrace.vocabulary import FinishReason
from tests.headrace.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

MODEL = "tiny"
QUICK = ResumePolicy(first_backoff_s=0.01, max_backoff_s=0.1)
NUM_TOKENS = 60
PROMPT = "hello world"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(tiny_model: Path) -> AsyncIterator[str]:
    config = LocalConfig(
        model_path=tiny_model,
        model_name=MODEL,
        worker_flags=("--num-threads", "1", "--num-kv-blocks", "200"),
    )
    async with local_pool(config) as pool:
        yield pool.address


async def cutting(
    deltas: AsyncIterator[Delta], proxy: TcpProxy, every: int
) -> AsyncIterator[Delta]:
    """The deltas, with a cut after each `every` of them."""
    num = 0
    async for delta in deltas:
        num += 1
        if num % every == 0:
            await proxy.cut()
        yield delta


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "seeded": {"sampling": Sampling(temperature=1.0, seed=7)},
    "two completions": {"sampling": Sampling(temperature=1.0, seed=7, n=2)},
    "logprobs": {"sampling": Sampling(temperature=1.0, seed=7, logprobs=2)},
    "prompt logprobs": {"sampling": Sampling(seed=7, prompt_logprobs=1, logprobs=0)},
    "echo": {"sampling": Sampling(seed=7), "echo": True},
    "special tokens": {"sampling": Sampling(seed=9), "keep_special_tokens": True},
    "logprobs of two": {"sampling": Sampling(temperature=1.0, seed=7, n=2, logprobs=1)},
}


async def ask(address: str, every: int, **options: Any) -> tuple[Completion, Completion]:
    """The answer of a stream that is cut, and of one that is not."""
    async with TcpProxy(address) as proxy, HeadraceClient(proxy.address, resume=QUICK) as client:
        whole = await client.complete(PROMPT, **options)
        async with contextlib.aclosing(client.generate(PROMPT, **options)) as deltas:
            cut = await gather(cutting(deltas, proxy, every))
    assert cut.num_resumes > 0
    return cut, whole


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("case", CASES)
async def test_a_cut_stream_gives_what_a_whole_one_gives(
    address: str, case: str, every: int
) -> None:
    given = CASES[case]
    sampling = replace(given["sampling"], max_tokens=NUM_TOKENS, ignore_eos=True)
    options = given | {"sampling": sampling}
    cut, whole = await ask(address, every, **options)
    assert cut.outputs == whole.outputs
    assert cut.prompt_logprobs == whole.prompt_logprobs
    assert cut.usage is not None
    assert whole.usage is not None
    assert cut.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_a_cut_stream_where_it_ends_a_whole_one(
    address: str, include: bool
) -> None:
    free = Sampling(temperature=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with HeadraceClient(address) as client:
        text = (await client.complete(PROMPT, sampling=free)).text
    # Begins in one token and ends in another, late in the text.
    begin = len(text) - 12
    sampling = replace(free, stop=text[begin : begin + 4])
    cut, whole = await ask(address, 2, sampling=sampling, include_stop_str_in_output=include)
    assert cut.outputs == whole.outputs
    assert whole.outputs[0].finish_reason is FinishReason.STOP
