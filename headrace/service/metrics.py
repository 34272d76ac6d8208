"""Metrics: how a service defines what it counts, and how it counts.

A service keeps plain numbers, and its one file `metrics.py` describes each as a `Metric` and reads
them all. Nothing is computed until a scrape or an export asks: then the event loop reads every
number at one moment, so that sums across metrics hold. `exposition` turns what was read into
OpenTelemetry's data model and into Prometheus' text; `monitoring` serves and sends it.

OpenTelemetry's SDK takes 8 to 16 microseconds to record a value, so values are counted here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

# The values of a metric's labels, in the order of the labels; "" is an absent label.
Labels = tuple[str, ...]

OTHER = "other"

# Steps, and what happens within one: 0.1 ms to 13 s.
STEP_BOUNDS_S = tuple(0.0001 * 2**k for k in range(18))
# Waits: 1 ms to 10 minutes.
WAIT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


class Kind(Enum):
    """What a metric's value is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric.

    name and unit as OpenTelemetry has them: dots, and UCUM units ("s", "By", "{request}"). bounds
    are a histogram's upper bounds. vllm: the metric of vLLM that says the same, if there is one.
    """

    kind: Kind
    name: str
    unit: str
    description: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    vllm: str = ""


def counter(
    name: str, unit: str, description: str, labels: Labels = (), *, vllm: str = ""
) -> Metric:
    """A number that only grows, until the process ends."""
    return Metric(Kind.COUNTER, name, unit, description, labels, vllm=vllm)


def gauge(name: str, unit: str, description: str, labels: Labels = (), *, vllm: str = "") -> Metric:
    """A number of now."""
    return Metric(Kind.GAUGE, name, unit, description, labels, vllm=vllm)


def histogram(
    name: str,
    unit: str,
    description: str,
    labels: Labels = (),
    *,
    bounds: Sequence[float],
    vllm: str = "",
) -> Metric:
    """How values are distributed since the process began."""
    return Metric(Kind.HISTOGRAM, name, unit, description, labels, tuple(bounds), vllm)


class Distribution:
    """Values counted by bucket: counts is [len(bounds) + 1], the last without an upper bound."""

    __slots__ = ("counts", "sum")

    def __init__(self, counts: list[int], total: float = 0.0) -> None:
        self.counts = counts
        self.sum = total

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return sum(self.counts)

    def add(self, other: "Distribution") -> None:
        """Count the other's values too."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum += other.sum

    def copy(self) -> "Distribution":
        """The same, from now on apart."""
        return Distribution(self.counts.copy(), self.sum)


Points = Mapping[Labels, float | Distribution]
# A metric and its values now, by labels.
Reading = tuple[Metric, Points]
Source = Callable[[], Iterable[Reading]]


class Recorder:
    """Records the values of a histogram; costs less than a microsecond each."""

    __slots__ = ("_by_labels", "metric")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._by_labels: dict[Labels, Distribution] = {}

    def record(self, value: float, labels: Labels = ()) -> None:
        """Record a value; labels have the order of the metric's."""
        bounds = self.metric.bounds
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = Distribution([0] * (len(bounds) + 1))
        found.counts[bisect_left(bounds, value)] += 1
        found.sum += value

    def read(self) -> Reading:
        """All that was recorded so far."""
        # Copied item by item: a worker's model thread may record meanwhile.
        return self.metric, {key: found.copy() for key, found in list(self._by_labels.items())}


class BoundedLabel:
    """Gives callers' names a bounded number of label values: later ones are "other"."""

    def __init__(self, known: Iterable[str] = (), *, max_values: int) -> None:
        """known names always have their own value; the others as they come."""
        self._values = {name: name for name in known}
        self._max_values = max_values

    def of(self, name: str) -> str:
        """The label value for a name; the same for the life of the process."""
        value = self._values.get(name)
        if value is not None:
            return value
        if len(self._values) >= self._max_values:
            return OTHER
        self._values[name] = name
        return name
