"""The persistent batch: what a plan changes, what a step gathers, and which plans are refused."""

from typing import Any

import numpy as np
import pytest

from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch
from gpuworker.core.plan import AssignedRequest, PlanError, ReceivedPlan, SamplingSettings
from tests.gpuworker.driver import int32

LIMITS = BatchLimits(
    max_num_seqs=6,
    max_model_len=40,
    max_num_batched_tokens=64,
    block_size=4,
    num_kv_blocks=30,
    vocab_size=100,
    eos_token_ids=(2,),
)


def request(
    row: int, num_tokens: int, num_prompt: int | None = None, **sampling: Any
) -> AssignedRequest:
    tokens = int32(*range(10, 10 + num_tokens))
    settings = SamplingSettings(**sampling)
    return AssignedRequest(row, f"r{row}", tokens, num_prompt or num_tokens, settings)


def blocks(**ids_by_row: tuple[int, ...]) -> dict[str, Any]:
    """Appended blocks, e.g. blocks(r2=(7, 9))."""
    pairs = [(int(row[1:]), block) for row, ids in ids_by_row.items() for block in ids]
    return {
        "appended_block_rows": int32(*(row for row, _ in pairs)),
        "appended_block_ids": int32(*(block for _, block in pairs)),
    }


def rows(**computed_scheduled: tuple[int, int]) -> dict[str, Any]:
    """Rows that advance, e.g. rows(r2=(0, 5))."""
    return {
        "rows": int32(*(int(row[1:]) for row in computed_scheduled)),
        "num_computed_tokens": int32(*(c for c, _ in computed_scheduled.values())),
        "num_scheduled_tokens": int32(*(n for _, n in computed_scheduled.values())),
    }


def apply(batch: InputBatch, **plan: Any) -> FlatBatch:
    return batch.apply(ReceivedPlan(step_id=1, **plan))


@pytest.fixture
def batch() -> InputBatch:
    """Row 1 holds 6 tokens over blocks 5, 3; row 4 holds 9 tokens over blocks 8, 9, 7."""
    batch = InputBatch(LIMITS)
    apply(
        batch,
        row_requests=(request(1, 6), request(4, 9, 7)),
        **blocks(r4=(8,), r1=(5, 3)),
    )
    apply(batch, **blocks(r4=(9, 7)))
    return batch


def test_gathers_a_flat_batch_in_the_plans_order(batch: InputBatch) -> None:
    flat = apply(batch, **rows(r4=(3, 6), r1=(0, 2)))
    assert flat.query_start_loc.tolist() == [0, 6, 8]
    assert flat.seq_lens.tolist() == [9, 2]
    assert flat.positions.tolist() == [3, 4, 5, 6, 7, 8, 0, 1]
    assert flat.token_ids.tolist() == [13, 14, 15, 16, 17, 18, 10, 11]
    assert flat.slot_mapping.tolist() == [35, 36, 37, 38, 39, 28, 20, 21]
    assert flat.block_table.tolist() == [[8, 9, 7], [5, 3, 0]]


def test_only_a_row_at_its_last_token_samples(batch: InputBatch) -> None:
    flat = apply(batch, **rows(r4=(3, 6), r1=(0, 2)))
    assert flat.num_samples.tolist() == [1, 0]
    assert flat.logits_indices.tolist() == [5]
    assert flat.sample_rows.tolist() == [4]
    assert flat.sample_positions.tolist() == [2]
    assert flat.sample_num_tokens.tolist() == [9]


def test_sampled_tokens_become_the_rows_tokens(batch: InputBatch) -> None:
    batch.append_sampled(int32(4, 1), int32(2, 0), int32(77, 78))
    batch.append_sampled(int32(1), int32(1), int32(79))
    flat = apply(batch, **rows(r4=(9, 2), r1=(5, 2)))
    assert flat.token_ids.tolist() == [77, 78, 15, 79]
    assert flat.num_samples.tolist() == [1, 1]
    assert flat.sample_positions.tolist() == [4, 1]


def test_drafts_follow_the_last_token_and_each_samples(batch: InputBatch) -> None:
    flat = apply(
        batch,
        num_draft_tokens=int32(0, 2),
        draft_token_ids=int32(50, -1),
        **rows(r1=(5, 1), r4=(8, 3)),
    )
    assert flat.token_ids.tolist() == [15, 18, 50, 0]
    assert flat.num_samples.tolist() == [1, 3]
    assert flat.logits_indices.tolist() == [0, 1, 2, 3]
    assert flat.sample_rows.tolist() == [1, 4, 4, 4]
    assert flat.sample_positions.tolist() == [0, 2, 3, 4]
    assert flat.sample_num_tokens.tolist() == [6, 9, 10, 11]


def test_drafts_that_were_not_accepted_leave_no_trace(batch: InputBatch) -> None:
    apply(batch, num_draft_tokens=int32(1), draft_token_ids=int32(50), **rows(r4=(8, 2)))
    batch.append_sampled(int32(4), int32(1), int32(60))
    assert apply(batch, **rows(r4=(8, 2))).token_ids.tolist() == [18, 60]


def test_a_freed_row_can_be_placed_again_in_the_same_plan(batch: InputBatch) -> None:
    flat = apply(
        batch,
        freed_rows=int32(4),
        row_requests=(request(4, 2),),
        **blocks(r4=(20,)),
        **rows(r4=(0, 2)),
    )
    assert flat.slot_mapping.tolist() == [80, 81]
    assert flat.block_table.tolist() == [[20]]


def test_a_plan_may_only_free(batch: InputBatch) -> None:
    flat = apply(batch, freed_rows=int32(1, 4))
    assert flat.num_tokens == 0
    assert flat.num_samples.tolist() == []


def test_blocks_of_several_rows_keep_their_order() -> None:
    batch = InputBatch(LIMITS)
    apply(
        batch,
        row_requests=(request(0, 8), request(2, 8)),
        appended_block_rows=int32(2, 0, 2, 0),
        appended_block_ids=int32(11, 12, 13, 14),
    )
    assert apply(batch, **rows(r0=(0, 8), r2=(0, 8))).block_table.tolist() == [[12, 14], [11, 13]]


def test_prompt_places_leave_out_the_first_token_and_the_output() -> None:
    batch = InputBatch(LIMITS)
    flat = apply(
        batch,
        row_requests=(request(0, 5, 4, num_prompt_logprobs=2), request(1, 3)),
        **blocks(r0=(1, 2), r1=(3,)),
        **rows(r1=(0, 3), r0=(0, 5)),
    )
    assert flat.prompt_rows.tolist() == [0, 0, 0]
    assert flat.prompt_indices.tolist() == [3, 4, 5]
    assert flat.prompt_target_ids.tolist() == [11, 12, 13]


BROKEN = {
    "frees an empty row": ({"freed_rows": int32(2)}, "freed_rows: row 2 is empty"),
    "frees a row out of range": ({"freed_rows": int32(6)}, "freed_rows"),
    "frees a row twice": ({"freed_rows": int32(1, 1)}, "freed_rows: a row appears twice"),
    "places in a taken row": ({"row_requests": (request(1, 2),)}, "row 1 is taken by 'r1'"),
    "places past the rows": ({"row_requests": (request(6, 2),)}, "row 6 is not in"),
    "places too long a request": ({"row_requests": (request(0, 41),)}, "max_model_len 40"),
    "places nothing": ({"row_requests": (request(0, 0, 1),)}, "at least 1"),
    "biases an unknown token": (
        {"row_requests": (request(0, 2, logit_bias=((100, 1.0),)),)},
        "logit_bias",
    ),
    "appends the null block": (blocks(r1=(0,)), "blocks must be in"),
    "appends a block past the pool": (blocks(r1=(30,)), "blocks must be in"),
    "appends to an empty row": (blocks(r0=(6,)), "appended_block_rows: row 0 is empty"),
    "appends too many blocks": (blocks(r1=tuple(range(10, 20))), "more than 10 blocks"),
    "appends unequal columns": (
        {"appended_block_rows": int32(1), "appended_block_ids": int32()},
        "appended_block_ids",
    ),
    "advances an empty row": (rows(r0=(0, 1)), "rows: row 0 is empty"),
    "advances a row twice": (
        {
            "rows": int32(1, 1),
            "num_computed_tokens": int32(0, 1),
            "num_scheduled_tokens": int32(1, 1),
        },
        "rows: a row appears twice",
    ),
    "advances by nothing": (rows(r1=(0, 0)), "num_scheduled_tokens"),
    "advances past the tokens": (rows(r1=(2, 5)), "past the tokens it has"),
    "advances past the blocks": (
        {"freed_rows": int32(4), "row_requests": (request(4, 5),), **blocks(r4=(8,))}
        | rows(r4=(0, 5)),
        "too few KV blocks",
    ),
    "has computed more than can be counted": (rows(r1=(2**31 - 1, 2)), "past the tokens it has"),
    "has negative computed tokens": (rows(r1=(-1, 2)), "num_computed_tokens"),
    "has columns of unequal length": (rows(r1=(0, 2)) | {"rows": int32(1, 4)}, "values for 2"),
    "drafts before the last token": (
        rows(r1=(0, 3)) | {"num_draft_tokens": int32(1), "draft_token_ids": int32(5)},
        "before its last token",
    ),
    "drafts without ids": (
        rows(r1=(5, 2)) | {"num_draft_tokens": int32(1)},
        "num_draft_tokens",
    ),
    "drafts an unknown token": (
        rows(r1=(5, 2)) | {"num_draft_tokens": int32(1), "draft_token_ids": int32(100)},
        "draft_token_ids",
    ),
}


@pytest.mark.parametrize(("plan", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plan_is_refused_by_name(
    batch: InputBatch, plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        apply(batch, **plan)


def test_a_plan_over_the_token_limit_is_refused() -> None:
    limits = BatchLimits(
        max_num_seqs=2,
        max_model_len=40,
        max_num_batched_tokens=8,
        block_size=4,
        num_kv_blocks=30,
        vocab_size=100,
    )
    batch = InputBatch(limits)
    with pytest.raises(PlanError, match="max_num_batched_tokens 8"):
        apply(batch, row_requests=(request(0, 9),), **blocks(r0=(1, 2, 3)), **rows(r0=(0, 9)))


def test_a_cleared_batch_is_empty(batch: InputBatch) -> None:
    batch.clear()
    with pytest.raises(PlanError, match="row 1 is empty"):
        apply(batch, **rows(r1=(0, 1)))
    flat = apply(batch, row_requests=(request(1, 3),), **blocks(r1=(2,)), **rows(r1=(0, 3)))
    assert flat.block_table.tolist() == [[2]]


def test_random_plans_gather_what_a_plain_loop_does() -> None:
    rng = np.random.default_rng(5)
    batch = InputBatch(LIMITS)
    for _ in range(30):
        batch.clear()
        lengths = rng.integers(1, 20, 6)
        ids = iter(rng.permutation(np.arange(1, 30)).tolist() * 2)
        tables = {row: [next(ids) for _ in range(5)] for row in range(6)}
        order = rng.permutation(6).tolist()
        computed = {row: int(rng.integers(0, lengths[row])) for row in order}
        budget = {row: max(1, (lengths[row] - computed[row]) // 2) for row in order}
        flat = apply(
            batch,
            row_requests=tuple(request(row, int(lengths[row])) for row in range(6)),
            **blocks(**{f"r{row}": tuple(table) for row, table in tables.items()}),
            **rows(**{f"r{row}": (computed[row], int(budget[row])) for row in order}),
        )
        positions = [(row, computed[row] + i) for row in order for i in range(budget[row])]
        assert flat.positions.tolist() == [p for _, p in positions]
        assert flat.token_ids.tolist() == [10 + p for _, p in positions]
        assert flat.slot_mapping.tolist() == [
            tables[row][p // 4] * 4 + p % 4 for row, p in positions
        ]


def held(batch: InputBatch) -> dict[int, list[int]]:
    """The block tables that an audit gives, by row."""
    occupied = batch.occupied_rows()
    tables = np.split(occupied.block_ids, np.cumsum(occupied.num_blocks)[:-1])
    assert len(occupied.block_ids) == occupied.num_blocks.sum()
    return {int(row): table.tolist() for row, table in zip(occupied.rows, tables, strict=False)}


def test_an_audit_gives_the_blocks_of_every_occupied_row_in_order(batch: InputBatch) -> None:
    assert held(batch) == {1: [5, 3], 4: [8, 9, 7]}
    apply(batch, freed_rows=int32(1), row_requests=(request(0, 3),), **blocks(r0=(2,), r4=(6,)))
    assert held(batch) == {0: [2], 4: [8, 9, 7, 6]}


def test_an_audit_gives_blocks_that_a_freed_row_still_has(batch: InputBatch) -> None:
    batch.slots.free(int32(1))
    assert held(batch) == {1: [5, 3], 4: [8, 9, 7]}


def test_an_audit_of_an_empty_batch_is_empty(batch: InputBatch) -> None:
    batch.clear()
    assert held(batch) == {}
