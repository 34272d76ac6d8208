"""Finds stop strings in text that arrives in pieces, and holds back possible beginnings of them.

The rule, which does not depend on how the text is cut into pieces: reading character by
character, the first stop string to be complete ends the text; of several complete at the same
character, the longest. Text is released as soon as it can no longer be the beginning of any stop
string.

Each stop string is matched by Knuth, Morris and Pratt's algorithm. Its table is made as far as text
has matched, so a request with many long stop strings costs nothing before its text resembles them.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, shared by its completions."""

    __slots__ = ("_borders", "first_chars", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops are not empty strings."""
        assert all(stops), "an empty stop string would match everywhere"
        self.stops = tuple(stops)
        self.first_chars = frozenset(stop[0] for stop in stops)
        self._borders = [[0] for _ in stops]

    def step(self, index: int, num_matched: int, char: str) -> int:
        """The length of the stop string's prefix that the text ends with, after one more character.

        num_matched is that length before the character.
        """
        stop = self.stops[index]
        while num_matched and stop[num_matched] != char:
            num_matched = self.border(index, num_matched)
        return num_matched + 1 if stop[num_matched] == char else 0

    def border(self, index: int, length: int) -> int:
        """The longest proper prefix of a stop string that its first characters end with."""
        stop, borders = self.stops[index], self._borders[index]
        while len(borders) < length:
            char, border = stop[len(borders)], borders[-1]
            while border and stop[border] != char:
                border = borders[border - 1]
            borders.append(border + 1 if stop[border] == char else 0)
        return borders[length - 1]


class StopScanner:
    """The state of matching in one text; owns the characters that are held back."""

    __slots__ = ("_held", "_includes_stop", "_num_matched", "_stops")

    def __init__(self, stops: StopStrings, *, includes_stop: bool = False) -> None:
        """includes_stop keeps a matched stop string in the text."""
        self._stops = stops
        self._includes_stop = includes_stop
        self._num_matched = [0] * len(stops.stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text to show now, and the stop string found, if any; push nothing after that.

        may_stop False: a stop string that this text completes is ordinary text. A stop string that
        begins in this text and is completed by later text is still found.
        """
        stops, num_matched = self._stops, self._num_matched
        if not self._held and not any(char in text for char in stops.first_chars):
            return text, None
        for position, char in enumerate(text):
            length = 0
            for index, stop in enumerate(stops.stops):
                matched = stops.step(index, num_matched[index], char)
                if matched == len(stop):
                    length = max(length, matched)
                    matched = stops.border(index, matched)
                num_matched[index] = matched
            if length and may_stop:
                seen = self._held + text[: position + 1]
                begin = len(seen) - length
                self._held = ""
                return seen if self._includes_stop else seen[:begin], seen[begin:]
        seen = self._held + text
        shown = len(seen) - max(num_matched)
        self._held = seen[shown:]
        return seen[:shown], None

    def finish(self) -> str:
        """The text held back, released at the end of the text."""
        held, self._held = self._held, ""
        self._num_matched = [0] * len(self._num_matched)
        return held
