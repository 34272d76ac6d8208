"""Shows steps on stderr: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from headrace.service.model_files import Progress

_MEGABYTE = 1_000_000
_CLEAR_LINE = "\r\x1b[K"


class ProgressSteps:
    """Shows steps one after the other, with the time each took; a context manager."""

    def __init__(self) -> None:
        self._out = sys.stderr
        self._is_live = sys.stderr.isatty()
        self._step: str | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.done()
        elif self._is_live and self._step is not None:
            self._out.write("\n")

    def begin(self, step: str) -> None:
        """Ends the previous step and begins the next; text after a colon is the step's progress."""
        if self._step is None or step.partition(":")[0] != self._step.partition(":")[0]:
            self.done()
            self._began = time.monotonic()
        self._step = step
        if self._is_live:
            self._out.write(f"{self._clear}  {step} ...")
            self._out.flush()

    def done(self) -> None:
        """Ends the step; its line stays on the terminal."""
        if self._step is None:
            return
        took = time.monotonic() - self._began
        self._out.write(f"{self._clear}  {self._step}  {took:.1f} s\n")
        self._out.flush()
        self._step = None

    def fetched(self, progress: "Progress") -> None:
        """Shows a download's progress as a step."""
        if progress.what != self._step:
            self.begin(progress.what)
        if self._is_live and progress.total_bytes:
            done, total = progress.done_bytes / _MEGABYTE, progress.total_bytes / _MEGABYTE
            self._out.write(f"{self._clear}  {progress.what} ... {done:.0f} of {total:.0f} MB")
            self._out.flush()

    def log(self, line: str) -> None:
        """Prints a line of a service's log above the live line."""
        self._out.write(f"{self._clear}{line}\n")
        if self._is_live and self._step is not None:
            self._out.write(f"  {self._step} ...")
        self._out.flush()

    @property
    def _clear(self) -> str:
        return _CLEAR_LINE if self._is_live else ""
