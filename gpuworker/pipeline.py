"""Which thread does what of a step: the model's starts and finishes it, another waits between.

So the model's thread is free to start the next step while the device is at work on one. Where a
step is done as soon as it is started, as on a CPU, one turn on the model's thread is all of it.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from gpuworker.core.plan import StepResult
from gpuworker.runner import PendingStep

Launch = Callable[[], PendingStep]
Finish = Callable[[PendingStep], StepResult]


class StepPipeline:
    """Steps in the order they are submitted.

    Args:
        model_thread: an executor of one thread, which alone touches the runner.
    """

    def __init__(self, model_thread: Executor) -> None:
        self._model_thread = model_thread
        self._waiting_thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, launch: Launch, finish: Finish) -> "Future[StepResult]":
        """Has a step run; both are called on the model's thread.

        Returns:
            Its result, or what `launch` or `finish` raised; it cannot be cancelled.
        """
        result: Future[StepResult] = Future()
        result.set_running_or_notify_cancel()
        self._model_thread.submit(self._launch, launch, finish, result)
        return result

    def _launch(self, launch: Launch, finish: Finish, result: "Future[StepResult]") -> None:
        try:
            step = launch()
            if step.is_done:
                result.set_result(finish(step))
                return
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            result.set_exception(error)
            return
        self._waiting_thread.submit(self._wait, step, partial(_settle, finish, step, result))

    def _wait(self, step: PendingStep, settle: Callable[[BaseException | None], None]) -> None:
        failure = None
        try:
            step.wait()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            failure = error
        self._model_thread.submit(settle, failure)


def _settle(
    finish: Finish,
    step: PendingStep,
    result: "Future[StepResult]",
    failure: BaseException | None,
) -> None:
    """Finishes the step, also one whose wait failed: the runner counts it."""
    try:
        outcome = finish(step)
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        failure = failure or error
    if failure is not None:
        result.set_exception(failure)
    else:
        result.set_result(outcome)
