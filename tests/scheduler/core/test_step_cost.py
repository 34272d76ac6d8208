"""Guards against a step whose cost grows again with every running request.

Ratios of medians taken in turns, so that a slow or busy machine does not matter.
"""

from benchmarks.scheduler import Bench, decodes, medians_us, mixed, request

STEPS = 80


def test_four_times_the_decodes_cost_less_than_four_times_as_much() -> None:
    few, many = medians_us([Bench(decodes(count, 200, None)) for count in (256, 1024)], STEPS)
    assert many < 4 * few, f"256: {few:.0f} us, 1024: {many:.0f} us"


def test_a_chunk_beside_the_decodes_costs_less_than_the_decodes_again() -> None:
    workloads = (decodes(256, 200, None), mixed(256, 512, 200, None))
    alone, beside = medians_us([Bench(workload) for workload in workloads], STEPS)
    assert beside < 3 * alone, f"alone {alone:.0f} us, with a chunk {beside:.0f} us"


def test_paused_requests_cost_a_step_nothing() -> None:
    few, many = Bench(decodes(64, 400, None)), Bench(decodes(64, 400, None))
    for key in range(1000, 2000):
        many.core.add_request(request(key, 20, 8), 0.0)
        many.core.pause_request(key)
    alone, beside = medians_us([few, many], 2 * STEPS)
    assert beside < 1.5 * alone, f"alone {alone:.0f} us, beside 1000 paused ones {beside:.0f} us"
