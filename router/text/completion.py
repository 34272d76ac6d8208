"""The text of one completion: tokens in, detokenized text out.

With stop strings, tokens are detokenized on arrival, so that a stop string is found even if the
client does not read. Without stop strings, tokens are detokenized just before a message is sent:
many tokens at once cost much less than one at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopScanner

# Text is kept in pieces of at least this many tokens: one string per token takes too much memory.
_PIECE_TOKENS = 256


@dataclass(slots=True)
class Piece:
    """Text of num_tokens tokens.

    text_offsets has one entry for each token, or none when offsets were not requested.
    """

    num_tokens: int
    text: str
    text_offsets: Sequence[int] = ()


class CompletionText:
    """Owns one completion's detokenizer and stop scanner, and the text not taken yet."""

    __slots__ = (
        "_detokenizer", "_has_offsets", "_is_closed", "_num_unstoppable", "_num_unwanted",
        "_offsets", "_pieces", "_scanner", "has_stops", "num_read",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: StopScanner | None = None,
        *,
        min_tokens: int = 0,
        has_offsets: bool = False,
        num_unwanted: int = 0,
    ) -> None:
        """A stop string counts when a token after the first min_tokens completes it.

        The first num_unwanted tokens are read like all others, but nothing of them is kept.
        """
        self.has_stops = scanner is not None
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._num_unstoppable = min_tokens
        self._has_offsets = has_offsets
        self._num_unwanted = num_unwanted
        self._is_closed = False
        self.num_read = 0
        self._offsets: list[int] = []
        self._pieces: deque[Piece] = deque()

    def read(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Detokenize new tokens, in order.

        Returns:
            The number of tokens up to a stop string, and the stop string that the last of these
            completed, if any. Once a stop string is found, the text is closed.
        """
        if self._scanner is None and not self._has_offsets:
            border = max(0, self._num_unwanted - self.num_read)
            for part in (token_ids[:border], token_ids[border:]) if border else (token_ids,):
                self._add(len(part), self._detokenizer.push(part))
            return len(token_ids), None
        for count, token_id in enumerate(token_ids, start=1):
            self._add_offset()
            text, stop = self._scan(self._detokenizer.push((token_id,)))
            self._add(1, text)
            if stop is not None:
                self._is_closed = True
                return count, stop
        return len(token_ids), None

    def skip(self, num_tokens: int) -> None:
        """Count tokens without text: the token that stopped the request."""
        for _ in range(num_tokens):
            self._add_offset()
            self._add(1, "")

    def close(self, suffix: str = "") -> str | None:
        """Release the text held back, at the end of the tokens, and then the suffix.

        Returns:
            The stop string that the held-back text completed, if any.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        text, stop = self._detokenizer.finish(), None
        if self._scanner is not None:
            text, stop = self._scanner.push(text)
            if stop is None:
                text += self._scanner.finish() + suffix
        self._add(0, text)
        return stop

    def take(self, max_tokens: int) -> Piece:
        """Takes the text of at most about max_tokens detokenized tokens."""
        if not self._pieces:
            return Piece(0, "")
        taken = self._pieces.popleft()
        while self._pieces and taken.num_tokens + self._pieces[0].num_tokens <= max_tokens:
            piece = self._pieces.popleft()
            taken.num_tokens += piece.num_tokens
            taken.text += piece.text
        taken.text_offsets = self._offsets[: taken.num_tokens]
        del self._offsets[: taken.num_tokens]
        return taken

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._scanner is None:
            return text, None
        may_stop = self._num_unstoppable == 0
        if not may_stop:
            self._num_unstoppable -= 1
        return self._scanner.push(text, may_stop=may_stop)

    def _add_offset(self) -> None:
        if self._has_offsets and self.num_read >= self._num_unwanted:
            self._offsets.append(self._detokenizer.num_chars)

    def _add(self, num_tokens: int, text: str) -> None:
        """Keep the text of tokens that are all wanted, or all unwanted."""
        is_wanted = self.num_read >= self._num_unwanted
        self.num_read += num_tokens
        if not is_wanted:
            return
        if self._pieces and self._pieces[-1].num_tokens < _PIECE_TOKENS:
            self._pieces[-1].num_tokens += num_tokens
            self._pieces[-1].text += text
        else:
            self._pieces.append(Piece(num_tokens, text))
