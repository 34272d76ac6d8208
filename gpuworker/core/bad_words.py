"""Token sequences that a request's output must not contain.

The forbidden next tokens depend on the output so far alone, not on logits or rows.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gpuworker.core.plan import Int32Array, Int64Array


class BadWords:
    """The forbidden token sequences of one request.

    Args:
        sequences: each of one token or more; a sequence with a token outside the vocabulary can
            never be generated, and is ignored.
        vocab_size: token ids are in [0, vocab_size).
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        possible = [s for s in sequences if s and min(s) >= 0 and max(s) < vocab_size]
        single = {s[0] for s in possible if len(s) == 1}
        self._always: Int64Array = np.array(sorted(single), dtype=np.int64)
        # Indexed by a sequence's second to last token: in most steps one look-up finds nothing.
        self._longer: defaultdict[int, list[tuple[Int32Array, int]]] = defaultdict(list)
        for *beginning, last in possible:
            if beginning and last not in single:
                entry = (np.array(beginning, dtype=np.int32), last)
                self._longer[beginning[-1]].append(entry)

    @property
    def looks_back(self) -> bool:
        """Whether the forbidden tokens depend on the output so far."""
        return bool(self._longer)

    def forbidden_after(self, output: Int32Array) -> Int64Array:
        """The tokens that would complete a sequence.

        Args:
            output: [num_tokens] tokens generated so far, drafts before the sample included.

        Returns:
            [num_forbidden] token ids; a token may occur twice.
        """
        if not (self._longer and len(output)):
            return self._always
        completing = [
            last
            for beginning, last in self._longer.get(int(output[-1]), ())
            if np.array_equal(output[-len(beginning) :], beginning)
        ]
        if not completing:
            return self._always
        return np.concatenate([self._always, np.array(completing, dtype=np.int64)])
