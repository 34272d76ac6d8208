"""Edits of single logits before a token is chosen: biases and forbidden tokens."""

import numpy as np

from gpuworker.core.input_batch import FlatBatch, InputBatch
from gpuworker.core.plan import Float32Array, Int64Array
from gpuworker.device.transfers import Transfers
from gpuworker.kernels.ops import LogitEdits

_FORBIDDEN: Float32Array = np.array([-np.inf], dtype=np.float32)


def logit_edits(batch: FlatBatch, rows: InputBatch, transfers: Transfers) -> LogitEdits | None:
    """The edits of a step's samples, on the device, or None without edits.

    For a row with bad words of several tokens, the host must know all earlier tokens of the row.
    """
    slots = rows.slots
    if not (slots.bias_by_row or slots.stop_token_ids_by_row or slots.bad_words_by_row):
        return None
    edits: list[tuple[int, Int64Array, Float32Array]] = []
    for i, row in enumerate(batch.sample_rows.tolist()):
        bias = slots.bias_by_row.get(row)
        if bias is not None:
            edits.append((i, bias.token_ids, bias.values))
        stops = slots.stop_token_ids_by_row.get(row)
        if stops is not None and batch.sample_positions[i] < slots.min_tokens[row]:
            edits.append((i, stops, _FORBIDDEN))
        bad_words = slots.bad_words_by_row.get(row)
        if bad_words is not None:
            # The row's drafts follow its tokens in token_ids, so that the output before a sample
            # includes the drafts before the sample.
            output = rows.token_ids[row, rows.num_prompt_tokens[row] : batch.sample_num_tokens[i]]
            edits.append((i, bad_words.forbidden_after(output), _FORBIDDEN))
    if not edits:
        return None
    samples, token_ids, values = zip(*edits, strict=True)
    counts = [len(ids) for ids in token_ids]
    return LogitEdits(
        transfers.to_device(np.repeat(np.array(samples, dtype=np.int32), counts)),
        transfers.to_device(np.concatenate(token_ids).astype(np.int32)),
        transfers.to_device(
            np.concatenate([np.broadcast_to(v, n) for v, n in zip(values, counts, strict=True)])
        ),
    )
