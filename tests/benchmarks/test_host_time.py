"""The benchmark of the worker's host time runs every part, without a GPU."""

from benchmarks.host_time import measure


def test_every_step_is_replayed_and_every_part_takes_time() -> None:
    figures = measure(num_seqs=12, num_steps=100)
    assert {len(values) for values in figures.values()} == {90}
    assert all((values > 0).all() for values in figures.values())
    assert (figures["parse + prepare"] < figures["all"]).all()
