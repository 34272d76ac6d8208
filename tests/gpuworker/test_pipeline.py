"""Steps through the pipeline's threads, whatever is raised there."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuworker.pipeline import StepPipeline


class Panic(BaseException):
    """As a library in Rust raises it."""


class Step:
    is_done = False

    def __init__(self, fails_in=""):
        self._fails_in = fails_in
        self.is_finished = False

    def launch(self):
        return self._do("launch", self)

    def wait(self):
        self._do("wait", None)

    def finish(self, _pending):
        self.is_finished = True
        return self._do("finish", "tokens")

    def _do(self, what, result):
        if self._fails_in == what:
            raise Panic(what)
        return result


@pytest.mark.parametrize("place", ["launch", "wait", "finish"])
def test_what_a_thread_raises_is_the_steps_and_the_next_one_runs(place):
    with ThreadPoolExecutor(1) as model_thread:
        pipeline = StepPipeline(model_thread)
        step, following = Step(place), Step()
        results = [pipeline.submit(each.launch, each.finish) for each in (step, following)]
        with pytest.raises(Panic, match=place):
            results[0].result(60)
        assert results[1].result(60) == "tokens"
        assert step.is_finished is (place != "launch")
