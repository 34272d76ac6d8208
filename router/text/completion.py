"""The text of one completion: tokens in, what may be shown out, until a stop string is found."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopScanner


@dataclass(frozen=True, slots=True)
class Advance:
    """What some tokens gave.

    num_tokens of them count: all, or those up to the one that completed stop, the stop string
    found. text_offsets has one entry for each that counts, or none when not asked for.
    """

    text: str
    num_tokens: int
    stop: str | None = None
    text_offsets: Sequence[int] = ()


class CompletionText:
    """Owns one completion's detokenizer and stop scanner."""

    __slots__ = ("_detokenizer", "_has_offsets", "_num_tokens", "_num_unscanned", "_scanner")

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: StopScanner | None = None,
        *,
        min_tokens: int = 0,
        has_offsets: bool = False,
    ) -> None:
        """The text of the first min_tokens tokens is not searched for stop strings."""
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._num_unscanned = min_tokens
        self._has_offsets = has_offsets
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> Advance:
        """Take tokens, in order; after a stop string is found, push no more."""
        if self._scanner is None and not self._has_offsets:
            return Advance(self._detokenizer.push(token_ids), len(token_ids))
        parts: list[str] = []
        offsets: list[int] = []
        for count, token_id in enumerate(token_ids, start=1):
            offsets.append(self._detokenizer.num_chars)
            text, stop = self._scan(self._detokenizer.push((token_id,)))
            parts.append(text)
            if stop is not None:
                return Advance("".join(parts), count, stop, self._offsets(offsets))
        return Advance("".join(parts), len(token_ids), None, self._offsets(offsets))

    def push_silent(self, token_ids: Sequence[int]) -> Advance:
        """Take tokens that have no text of their own: the one that stopped the request."""
        offsets = [self._detokenizer.num_chars] * len(token_ids)
        return Advance("", len(token_ids), None, self._offsets(offsets))

    def finish(self) -> Advance:
        """The rest, now that no more tokens come; it may complete a stop string yet."""
        text = self._detokenizer.finish()
        if self._scanner is None:
            return Advance(text, 0)
        shown, stop = self._scanner.push(text) if text else ("", None)
        return Advance(shown if stop else shown + self._scanner.finish(), 0, stop)

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._scanner is None:
            return text, None
        self._num_tokens += 1
        if self._num_tokens <= self._num_unscanned:
            return text, None
        return self._scanner.push(text)

    def _offsets(self, offsets: list[int]) -> Sequence[int]:
        return offsets if self._has_offsets else ()
