"""The compiled kernels on the GPU that is here, in the types that models are served in."""

from dataclasses import replace

import pytest
import torch

from gpuworker.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSetup,
    FlashInferUnavailableError,
    load,
)
from gpuworker.attention.interface import AttentionLayer
from gpuworker.attention.triton.backend import TritonAttention
from gpuworker.attention.triton.device import detect
from gpuworker.device.graphs import CudaGraphRecorder
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import LogitEdits, Verification
from gpuworker.kernels.twins import TorchOps
from tests.kernels.batches import Case, Step
from tests.kernels.families import FAMILIES, compare, with_kernels, with_torch

DEVICE = torch.device("cuda")
MIXED = ((1, 37), (5, 130), (40, 70), (1, 1), (3, 3), (1, 5000), (6, 9000), (300, 900))
CASES = {
    "plain": Case(MIXED, 32, 8, 128, page=64),
    "pages of 16": Case(MIXED, 28, 4, 128, page=16),
    "small heads": Case(MIXED, 9, 3, 64, page=64),
    "odd heads": Case(MIXED, 8, 8, 96, page=32),
    "window and cap": Case(
        MIXED, 8, 4, 256, page=64, layer=AttentionLayer(0.06, sliding_window=500, soft_cap=30.0)
    ),
}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def error(case, target):
    step = Step(replace(case, dtype=torch.bfloat16), DEVICE)
    backend = TritonAttention(step.setup(), target, DEVICE)
    out = step.run(backend)[: step.shape.num_tokens]
    return (out.double() - step.expected()[: step.shape.num_tokens]).abs().max().item()


@pytest.mark.parametrize("name", CASES)
def test_attention_is_right(name):
    assert error(CASES[name], detect(DEVICE)) < 2e-2


def test_attention_over_eight_bit_pools_is_right():
    target = detect(DEVICE)
    if not target.has_float8:
        pytest.skip("this GPU has no eight-bit floats")
    float8 = torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn
    assert error(replace(CASES["plain"], kv_dtype=float8), target) < 2e-2


@pytest.mark.parametrize("name", ["plain", "pages of 16", "small heads", "window and cap"])
def test_flashinfer_is_right(name):
    try:
        library = load()
    except FlashInferUnavailableError as error:
        pytest.skip(str(error))
    step = Step(replace(CASES[name], dtype=torch.bfloat16), DEVICE)
    setup = FlashInferSetup(step.kv_shape, step.case.num_heads, torch.bfloat16, step.kv.key.dtype)
    out = step.run(FlashInferAttention(setup, DEVICE, library))[: step.shape.num_tokens]
    expected = step.expected()[: step.shape.num_tokens]
    assert (out.double() - expected).abs().max().item() < 2e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_torch_does_on_a_cpu(name):
    target = detect(DEVICE)
    ours = with_kernels(name, torch.float32, target, DEVICE)
    compare(ours, with_torch(name, torch.float32), 1e-3)


# In sixteen bits the experts that tie with others may differ: those families are left out.
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if not name.endswith(("moe", "mixtral"))]
)
def test_a_family_in_bfloat16_is_close_to_torch_on_a_cpu(name):
    target = detect(DEVICE)
    ours = with_kernels(name, torch.bfloat16, target, DEVICE)
    compare(ours, with_torch(name, torch.bfloat16), 0.15)


def test_a_captured_step_serves_other_requests():
    case = Case(((1, 900), (1, 30), (2, 500)), 32, 8, 128, page=64, dtype=torch.bfloat16)
    first = Step(case, DEVICE)
    target = detect(DEVICE)
    backend = TritonAttention(first.setup(max_model_len=16384), target, DEVICE)
    first.run(backend)
    graph = torch.cuda.CUDAGraph()
    prepared = backend.prepare(first.shape)
    with torch.cuda.graph(graph):
        out = prepared.attend(first.query, first.kv, case.layer)
    # Other lengths in the same pool, as the next step of a serving worker has.
    shape = replace(first.shape, seq_lens=first.shape.seq_lens - 20)
    backend.prepare(shape)
    graph.replay()
    first.shape = shape
    assert (out.double() - first.expected()).abs().max() < 2e-2


def test_graphs_of_one_recorder_share_the_matrix_librarys_workspace():
    recorder = CudaGraphRecorder()
    x = torch.randn(256, 256, device=DEVICE)
    graphs = [recorder.record(lambda: x @ x)]
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    graphs += [recorder.record(lambda: x @ x) for _ in range(8)]
    torch.cuda.empty_cache()
    # One of its own for each would be 256 MiB on Hopper, 64 elsewhere.
    assert free - torch.cuda.mem_get_info()[0] < 48 << 20


def on_device(columns):
    """The same columns of a step, there."""
    from tests.kernels.test_sampling_kernels import mapped

    return mapped(columns, lambda x: x.to(DEVICE))


def test_edited_and_adjusted_logits_equal_the_twins():
    from tests.kernels.test_sampling_kernels import adjustments, column, random_logits

    given = adjustments()
    edits = LogitEdits(
        column([0, 2, -1, 2, 0]),
        column([7, 4999, 3, 1, 7]),
        column([1.5, -torch.inf, 9.0, 2.0, 0.25], torch.float32),
    )
    ours, theirs = random_logits(3, seed=2).to(DEVICE), random_logits(3, seed=2)
    TritonOps().edit_logits(ours, on_device(edits))
    TorchOps().edit_logits(theirs, edits)
    assert torch.equal(ours.cpu(), theirs)
    TritonOps().adjust_logits(ours, on_device(given))
    TorchOps().adjust_logits(theirs, given)
    assert torch.allclose(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_verified_drafts_equal_the_twins():
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(1, 100, (200,), generator=generator, dtype=torch.int32)
    starts = (counts.cumsum(0) - counts).int()
    firsts = ((counts - 1).cumsum(0) - (counts - 1)).int()
    drafts = torch.arange(int((counts - 1).sum()), dtype=torch.int32)
    token_ids = torch.zeros(int(counts.sum()), dtype=torch.int32)
    for start, count, first in zip(starts, counts, firsts, strict=True):
        token_ids[start : start + count - 1] = drafts[first : first + count - 1]
    token_ids[torch.rand(len(token_ids), generator=generator) < 0.02] = -1
    given = Verification(
        sample_starts=starts, num_samples=counts, draft_starts=firsts, drafts=drafts
    )
    kept = TritonOps().accept(token_ids.to(DEVICE), on_device(given))
    assert torch.equal(kept.cpu(), TorchOps().accept(token_ids, given))


def test_sampled_tokens_equal_the_twins():
    from tests.kernels.test_sampling_kernels import TRUNCATIONS, draws, random_logits

    scaled = random_logits(64, seed=1, size=128256).to(DEVICE)
    for truncation in TRUNCATIONS:
        given = on_device(draws(64, **truncation))
        ours, theirs = TritonOps().sample(scaled, given), TorchOps().sample(scaled, given)
        # The order of sums may move a threshold over one token in a long while.
        assert (ours != theirs).sum() <= 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import transformers

    from tests.gpuworker.tiny import LLAMA, save_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 4096}
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA | shape))
    return folder


def engine(checkpoint, *, utilization=0.3, **settings):
    from gpuworker.config import KvCacheSettings, WorkerSettings
    from gpuworker.engine import load_engine
    from gpuworker.models.source import open_source

    given = {"device": "cuda", "dtype": "float32", "max_num_seqs": 24}
    return load_engine(
        WorkerSettings(**given | settings),
        KvCacheSettings(gpu_memory_utilization=utilization),
        open_source(checkpoint),
        loading=lambda _done, _of: None,
        capturing=lambda _done, _of: None,
    )


def served(runner, depth):
    """Tokens of 20 requests of several settings in one batch, `depth` steps in flight."""
    from tests.gpuworker.driver import Driver
    from tests.gpuworker.test_runner import prompts, settings

    driver = Driver(runner)
    requests = [driver.add(i, tokens, settings(i)) for i, tokens in enumerate(prompts(20))]
    while any(len(request.output) < 40 for request in requests):
        if driver.num_launched == depth:
            driver.finish_oldest()
        driver.launch({r.row: len(r.tokens) - r.num_computed_tokens for r in requests})
    while driver.num_launched:
        driver.finish_oldest()
    runner.reset()
    return [request.output[:40] for request in requests]


def test_replayed_steps_give_the_tokens_of_launched_ones(checkpoint):
    # In float32 and the same padded size a replay runs the kernels that a launch does.
    replayed = served(engine(checkpoint, cuda_graph_sizes=(20,)).runner, 1)
    assert served(engine(checkpoint, enforce_eager=True).runner, 1) == replayed


def test_steps_launched_ahead_give_the_tokens_of_steps_in_turn(checkpoint):
    loaded = engine(checkpoint)
    assert loaded.pipeline_depth == 2
    assert served(loaded.runner, 2) == served(loaded.runner, 1)


def test_the_pool_leaves_room_for_the_largest_step(checkpoint):
    from gpuworker.memory_profile import largest_step

    runner = engine(checkpoint, utilization=0.5).runner
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.reset_peak_memory_stats()
    runner.execute(largest_step(runner.limits))
    runner.reset()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_reserved() <= 0.5 * total
