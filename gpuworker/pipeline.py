"""The threads of a step: the model's thread starts and finishes steps, another thread waits.

While the other thread waits for the device, the model's thread can start the next step. On a CPU a
step is complete when it has been started, and only the model's thread is used.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from gpuworker.core.plan import ExecutedStep
from gpuworker.runner import PendingStep

Launch = Callable[[], PendingStep]
Finish = Callable[[PendingStep], ExecutedStep]


class StepPipeline:
    """Runs steps in the order in which they are submitted.

    Args:
        model_thread: an executor of one thread, which alone touches the runner.
    """

    def __init__(self, model_thread: Executor) -> None:
        self._model_thread = model_thread
        self._waiting_thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, launch: Launch, finish: Finish) -> "Future[ExecutedStep]":
        """Runs a step; `launch` and `finish` are called on the model's thread.

        Returns:
            The step's result, or the exception of `launch` or `finish`; cannot be cancelled.
        """
        result: Future[ExecutedStep] = Future()
        result.set_running_or_notify_cancel()
        self._model_thread.submit(self._launch, launch, finish, result)
        return result

    def _launch(self, launch: Launch, finish: Finish, result: "Future[ExecutedStep]") -> None:
        try:
            step = launch()
            if step.is_done:
                result.set_result(finish(step))
                return
        except BaseException as error:  # noqa: BLE001 raised from the future
            result.set_exception(error)
            return
        self._waiting_thread.submit(self._wait, step, partial(_settle, finish, step, result))

    def _wait(self, step: PendingStep, settle: Callable[[BaseException | None], None]) -> None:
        failure = None
        try:
            step.wait()
        except BaseException as error:  # noqa: BLE001 raised from the future
            failure = error
        self._model_thread.submit(settle, failure)


def _settle(
    finish: Finish,
    step: PendingStep,
    result: "Future[ExecutedStep]",
    failure: BaseException | None,
) -> None:
    """Finishes the step even if the wait failed, because the runner keeps count of its steps."""
    try:
        outcome = finish(step)
    except BaseException as error:  # noqa: BLE001 raised from the future
        failure = failure or error
    if failure is not None:
        result.set_exception(failure)
    else:
        result.set_result(outcome)
