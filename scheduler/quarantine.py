"""How long a worker that keeps dying is left alone.

A worker that dies again and again costs its requests their time: each death sends them elsewhere.
"""

# A worker that dies sooner than that is no better than before.
_SOON_S = 60.0
# Deaths in a row before the first quarantine: fewer may be the fault of one request.
NUM_FREE_DEATHS = 3
# Shorter than requests wait for a worker: it may be the only one.
_LONGEST_S = 60.0


class Quarantine:
    """The deaths of one worker."""

    def __init__(self, first_s: float) -> None:
        """first_s: length of the first quarantine, doubled for each other one; 0: none ever."""
        self._first_s = first_s
        self.num_deaths = 0

    def died(self, lived_s: float) -> float:
        """Note that the worker died after lived_s; how long it is to be left alone now."""
        self.num_deaths = self.num_deaths + 1 if lived_s < _SOON_S else 1
        num_beyond = self.num_deaths - NUM_FREE_DEATHS
        if num_beyond <= 0:
            return 0.0
        return min(self._first_s * 2.0 ** min(num_beyond - 1, 32), _LONGEST_S)
