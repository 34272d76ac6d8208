"""Guards against a step whose cost grows again with every running request.

Ratios of medians taken in turns, so that a slow or busy machine does not matter.
"""

import statistics

from benchmarks.scheduler import WALK_EVERYTHING, Bench, decodes, mixed

ROUNDS = 5
STEPS_PER_ROUND = 16  # every row crosses a block boundary once


def costs(*benches: Bench) -> list[float]:
    """Median seconds per step of each, measured alternately."""
    spent: list[list[float]] = [[] for _ in benches]
    for _ in range(ROUNDS):
        for bench, seconds in zip(benches, spent, strict=True):
            seconds += [bench.step() for _ in range(STEPS_PER_ROUND)]
    return [statistics.median(seconds) for seconds in spent]


def test_columns_are_several_times_cheaper_than_request_by_request() -> None:
    workload = decodes(256, 200, None)
    columns, plain = costs(Bench(workload, None), Bench(workload, WALK_EVERYTHING))
    assert plain > 4 * columns, f"columns {columns * 1e6:.0f} us, plain {plain * 1e6:.0f} us"


def test_four_times_the_decodes_cost_less_than_four_times_as_much() -> None:
    few, many = costs(Bench(decodes(256, 200, None), None), Bench(decodes(1024, 200, None), None))
    assert many < 4 * few, f"256: {few * 1e6:.0f} us, 1024: {many * 1e6:.0f} us"


def test_a_chunk_beside_the_decodes_costs_less_than_the_decodes_again() -> None:
    alone, beside = costs(
        Bench(decodes(256, 200, None), None), Bench(mixed(256, 512, 200, None), None)
    )
    assert beside < 3 * alone, f"alone {alone * 1e6:.0f} us, with a chunk {beside * 1e6:.0f} us"
