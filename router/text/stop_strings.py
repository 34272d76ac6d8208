"""Finds stop strings in text that arrives in pieces, and releases no part of a stop string.

The result does not depend on how the text is cut into pieces. Reading character by character, the
first stop string to be complete ends the text; among several complete at the same character, the
longest wins. Text is released as soon as it can no longer be the beginning of any stop string. The
matcher is an Aho-Corasick automaton: a character's cost is independent of the stop strings.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of a set of stop strings; immutable, one per request.

    State 0 means that nothing has matched. A state's depth is how many of the last characters may
    be the beginning of a stop string.
    """

    __slots__ = ("depth", "fallback", "first_chars", "matched_len", "next_by_char", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops must not contain the empty string."""
        assert all(stops), "an empty stop string would match everywhere"
        self.stops = tuple(stops)
        self.first_chars = frozenset(stop[0] for stop in stops)
        self.next_by_char: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.matched_len = [0]  # length of the longest stop string that ends in this state
        self.fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.next_by_char[state].get(char)
            if following is None:
                following = len(self.depth)
                self.next_by_char[state][char] = following
                self.next_by_char.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched_len.append(0)
                self.fallback.append(0)
            state = following
        self.matched_len[state] = len(stop)

    def _link(self) -> None:
        """Link each state to the state of its longest proper suffix, breadth first."""
        pending = deque(self.next_by_char[0].values())
        while pending:
            state = pending.popleft()
            for char, child in self.next_by_char[state].items():
                self.fallback[child] = self.step(self.fallback[state], char)
                pending.append(child)
            if not self.matched_len[state]:
                self.matched_len[state] = self.matched_len[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.next_by_char[state]:
            state = self.fallback[state]
        return self.next_by_char[state].get(char, 0)

    def shortened(self, state: int) -> int:
        """Follows suffix links to the first state from which a stop string can continue."""
        while state and not self.next_by_char[state]:
            state = self.fallback[state]
        return state


class StopScanner:
    """The scan of one text; owns the characters held back."""

    __slots__ = ("_automaton", "_held", "_includes_stop", "_state")

    def __init__(self, automaton: StopStrings, *, includes_stop: bool = False) -> None:
        """includes_stop keeps a matched stop string in the text."""
        self._automaton = automaton
        self._includes_stop = includes_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text released now, and the stop string found, if any; after that, push no more.

        A stop string that is complete within text that may not stop is ordinary text; a stop string
        that begins there and is completed later is found.
        """
        automaton = self._automaton
        state = self._state
        if not state and not any(char in text for char in automaton.first_chars):
            return text, None
        for position, char in enumerate(text):
            state = automaton.step(state, char)
            length = automaton.matched_len[state]
            if length and not may_stop:
                state = automaton.shortened(state)
            elif length:
                seen = self._held + text[: position + 1]
                begin = len(seen) - length
                self._held, self._state = "", 0
                return seen if self._includes_stop else seen[:begin], seen[begin:]
        self._state = state
        seen = self._held + text
        shown = len(seen) - automaton.depth[state]
        self._held = seen[shown:]
        return seen[:shown], None

    def finish(self) -> str:
        """The text held back, released at the end of the text."""
        held, self._held, self._state = self._held, "", 0
        return held
