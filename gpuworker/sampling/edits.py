"""Edits of single logits before a token is chosen: biases and forbidden tokens."""

from dataclasses import dataclass, field

import numpy as np

from gpuworker.core.input_batch import FlatBatch, InputBatch
from gpuworker.core.plan import Float32Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class HostEdits:
    """Values to add to single logits of a step, -inf to forbid a token: [num_edits] each."""

    samples: Int32Array
    token_ids: Int32Array
    values: Float32Array


def logit_edits(batch: FlatBatch, rows: InputBatch) -> HostEdits | None:
    """The edits of a step's samples, or None without edits.

    For a row with bad words of several tokens, the host must know all earlier tokens of the row.
    """
    slots = rows.slots
    if not (slots.bias_by_row or slots.stop_token_ids_by_row or slots.bad_words_by_row):
        return None
    edits = _Edits()
    for i, row in enumerate(batch.sample_rows.tolist()):
        bias = slots.bias_by_row.get(row)
        if bias is not None:
            edits.add(i, bias.token_ids, bias.values)
        stops = slots.stop_token_ids_by_row.get(row)
        if stops is not None and batch.sample_positions[i] < slots.min_tokens[row]:
            edits.forbid(i, stops)
        bad_words = slots.bad_words_by_row.get(row)
        if bad_words is not None:
            # The row's drafts follow its tokens in token_ids, so that the output before a sample
            # includes the drafts before the sample.
            output = rows.token_ids[row, rows.num_prompt_tokens[row] : batch.sample_num_tokens[i]]
            edits.forbid(i, bad_words.forbidden_after(output))
    return edits.joined()


@dataclass(frozen=True, slots=True)
class _Edits:
    samples: list[Int32Array] = field(default_factory=list)
    token_ids: list[Int64Array] = field(default_factory=list)
    values: list[Float32Array] = field(default_factory=list)

    def add(self, sample: int, token_ids: Int64Array, values: Float32Array) -> None:
        self.samples.append(np.full(len(token_ids), sample, dtype=np.int32))
        self.token_ids.append(token_ids)
        self.values.append(values)

    def forbid(self, sample: int, token_ids: Int64Array) -> None:
        self.add(sample, token_ids, np.full(len(token_ids), -np.inf, dtype=np.float32))

    def joined(self) -> HostEdits | None:
        if not self.samples:
            return None
        return HostEdits(
            np.concatenate(self.samples),
            np.concatenate(self.token_ids).astype(np.int32),
            np.concatenate(self.values),
        )
