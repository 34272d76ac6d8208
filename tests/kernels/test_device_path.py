"""The worker's way over a GPU, from plans to tokens, against its way over a CPU.

Kernels run in Triton's interpreter, graphs are recordings, and what comes back from the device
arrives only when it is waited for; everything else is what a GPU worker runs.
"""

from pathlib import Path

import pytest
import torch
import transformers

from gpuworker import kv_pool
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.core.input_batch import BatchLimits
from gpuworker.core.plan import SamplingSettings
from gpuworker.engine import build_runner
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.launch import HeldKernel
from gpuworker.models.loader import load_decoder
from gpuworker.models.source import open_source
from gpuworker.runner import ModelRunner
from tests.gpuworker.driver import GREEDY, Driver
from tests.gpuworker.late import late_parts
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint
from tests.kernels.recorded_graphs import RecordingGraphs

CPU = torch.device("cpu")
SIZES = (1, 2, 4)
# The second request's tokens go on in another block then.
NUM_OUTPUT = 8
REQUESTS = (
    ([9, 20, 31, 42, 53, 64, 75], GREEDY),
    (
        [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 7],
        SamplingSettings(
            temperature=1.2, top_p=0.9, seed=2**63 + 1, frequency_penalty=0.7, presence_penalty=0.2,
            repetition_penalty=1.1,
        ),
    ),
    (
        [11, 12],
        SamplingSettings(temperature=0.9, top_k=30, seed=3, min_tokens=6, logit_bias=((5, 4.0),)),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}))
    return folder


@pytest.fixture(autouse=True)
def refuses_empty_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device does, and the interpreter does not."""
    launch = HeldKernel.__call__

    def checked(kernel: HeldKernel, grid: tuple[int, int, int], *arguments: object) -> None:
        assert min(grid) > 0, "nothing to start"
        launch(kernel, grid, *arguments)

    monkeypatch.setattr(HeldKernel, "__call__", checked)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Each request's first tokens, alone on a CPU."""
    outputs = []
    for prompt, sampling in REQUESTS:
        driver = Driver(make_runner(checkpoint, attention="torch"))
        driver.add(0, prompt, sampling)
        outputs.append(driver.finish(0, NUM_OUTPUT))
    return outputs


def device_runner(
    checkpoint: Path, *, graphs: RecordingGraphs | None = None, num_kv_blocks: int = 40
) -> ModelRunner:
    """As a worker on CUDA is put together, but on CPU tensors; unused KV slots are poisoned."""
    source = open_source(checkpoint)
    config = source.config
    limits = BatchLimits(
        max_num_seqs=6,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=64,
        block_size=16,
        num_kv_blocks=num_kv_blocks,
        vocab_size=config.vocab_size,
        eos_token_ids=source.eos_token_ids,
    )
    kv = kv_pool.allocate(config, num_kv_blocks, 16, torch.float32, CPU)
    for layer in kv:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    setup = AttentionSetup(
        shape=kv_pool.kv_shape(config, num_kv_blocks, 16),
        num_heads=config.attention.num_heads,
        kv_dtype=torch.float32,
        windows=(None,),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    ops = TritonOps()
    decoder = load_decoder(source, CPU, torch.float32, lambda _done, _all: None, ops)
    attention = TritonAttention(setup, Target("sm80", 1), CPU)
    runner = build_runner(decoder, attention, kv, limits, late_parts(ops))
    if graphs is not None:
        with torch.inference_mode():
            runner.forward.capture(SIZES, graphs, lambda _done, _all: None)
    return runner


def serve(driver: Driver, depth: int) -> list[list[int]]:
    """The requests in one batch: a chunk first, then token by token, `depth` steps in flight."""
    requests = [driver.add(row + 1, *request) for row, request in enumerate(REQUESTS)]
    chunk = {request.row: min(5, len(request.tokens)) for request in requests}
    driver.launch(chunk)
    while any(len(request.output) < NUM_OUTPUT for request in requests):
        if driver.num_launched == depth:
            driver.finish_oldest()
        left = {r.row: len(r.tokens) - r.num_computed_tokens for r in requests}
        driver.launch({row: count for row, count in left.items() if count})
    while driver.num_launched:
        driver.finish_oldest()
    return [request.output[:NUM_OUTPUT] for request in requests]


@pytest.mark.parametrize(("has_graphs", "depth"), [(False, 2), (True, 1), (True, 2)])
def test_tokens_are_those_of_the_cpu(
    checkpoint: Path, expected: list[list[int]], has_graphs: bool, depth: int
) -> None:
    graphs = RecordingGraphs()
    driver = Driver(device_runner(checkpoint, graphs=graphs if has_graphs else None))
    assert serve(driver, depth) == expected
    assert graphs.num_replays == (NUM_OUTPUT - 1 if has_graphs else 0)


def test_drafts_are_verified_in_a_replayed_step(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    graphs = RecordingGraphs()
    driver = Driver(device_runner(checkpoint, graphs=graphs))
    for row, request in enumerate(REQUESTS[:2]):
        driver.add(row, *request)
        driver.step({row: len(request[0])})
    assert graphs.num_replays == 0
    first, second = expected[:2]
    result = driver.step({0: 1, 1: 1}, {0: first[1:3]})
    assert result.num_sampled_tokens.tolist() == [3, 1]
    result = driver.step({1: 1, 0: 1}, {1: [second[2], (second[3] + 1) % 160]})
    assert result.num_sampled_tokens.tolist() == [2, 1]
    assert graphs.num_replays == 2
    assert driver.requests[0].output == first[:5]
    assert driver.requests[1].output == second[:4]
    assert driver.finish(1, 7)[:7] == second[:7]


def test_drafts_as_many_as_a_chunks_tokens_are_launched_as_they_come(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    """Attention takes them for a chunk, whose layout no graph has."""
    graphs = RecordingGraphs()
    runner = device_runner(checkpoint)
    with torch.inference_mode():
        runner.forward.capture((24,), graphs, lambda _done, _all: None)
    driver = Driver(runner)
    prompt, sampling = REQUESTS[0]
    driver.add(0, prompt, sampling)
    driver.step({0: len(prompt)})
    driver.step({0: 1}, {0: expected[0][1:] + [0] * 10})
    assert graphs.num_replays == 0
    assert driver.requests[0].output[:NUM_OUTPUT] == expected[0]


def test_a_step_that_samples_nothing_starts_no_sampling(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    driver = Driver(device_runner(checkpoint))
    prompt, sampling = REQUESTS[1]
    driver.add(0, prompt, sampling)
    assert driver.step({0: 4}).token_ids.tolist() == []
    driver.step({0: len(prompt) - 4})
    assert driver.requests[0].output == expected[1][:1]


def test_more_tokens_than_the_largest_size_are_launched_as_they_come(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    graphs = RecordingGraphs()
    driver = Driver(device_runner(checkpoint, graphs=graphs))
    prompt, sampling = REQUESTS[0]
    for row in range(5):
        driver.add(row, prompt, sampling)
    driver.step(dict.fromkeys(range(5), len(prompt)))
    driver.step(dict.fromkeys(range(5), 1))
    assert graphs.num_replays == 0
    driver.step(dict.fromkeys(range(3), 1))
    assert [graph.num_replays for graph in graphs.graphs] == [1, 0, 0]
    outputs = [driver.requests[row].output for row in range(5)]
    assert outputs == [expected[0][:3]] * 3 + [expected[0][:2]] * 2


def test_the_largest_size_is_captured_first_and_progress_is_told(checkpoint: Path) -> None:
    told = []
    graphs = RecordingGraphs()
    runner = device_runner(checkpoint)
    with torch.inference_mode():
        runner.forward.capture(SIZES, graphs, lambda done, of: told.append((done, of)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    driver = Driver(runner)
    driver.add(0, *REQUESTS[0])
    driver.step({0: 7})
    driver.step({0: 1})
    assert [graph.num_replays for graph in graphs.graphs] == [0, 0, 1]


def test_smaller_graphs_captured_later_write_where_the_largest_does(checkpoint: Path) -> None:
    """What a graph takes is measured by capturing two: no memory of one may go with the other."""
    forward = device_runner(checkpoint).forward
    graphs = RecordingGraphs()
    with torch.inference_mode():
        forward.capture([4], graphs, lambda _done, _of: None)
        logits = forward._graph_logits
        forward.capture([2], graphs, lambda _done, _of: None)
        assert forward._graph_logits is logits
        forward.capture([6], graphs, lambda _done, _of: None)
    assert len(forward._graph_logits) == 6
