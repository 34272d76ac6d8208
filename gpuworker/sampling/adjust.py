"""Changes logits before a token is chosen: bias, penalties, tokens that must not come yet.

Each touches only the tokens concerned, so the cost does not grow with the vocabulary.
"""

import numpy as np
import torch

from gpuworker.core.input_batch import FlatBatch, InputBatch


def adjust_logits(logits: torch.Tensor, batch: FlatBatch, rows: InputBatch) -> None:
    """Applies logit_bias, then penalties, then masks stop tokens and bad words, in place.

    Args:
        logits: [num_samples, vocab_size] float32.
        batch: whose sample columns say which row each is of.
        rows: settings and tokens of every row.
    """
    slots = rows.slots
    by_row = slots.bias_by_row or slots.stop_token_ids_by_row or slots.bad_words_by_row
    if not (by_row or slots.has_penalties.any()):
        return
    for i, row in enumerate(batch.sample_rows.tolist()):
        bias = slots.bias_by_row.get(row)
        if bias is not None:
            ids = torch.from_numpy(bias.token_ids).to(logits.device)
            logits[i].index_add_(0, ids, torch.from_numpy(bias.values).to(logits.device))
        if slots.has_penalties[row]:
            # Drafts stand behind the row's tokens: the place after a draft has seen it.
            _penalize(logits[i], rows, row, int(batch.sample_num_tokens[i]))
        stops = slots.stop_token_ids_by_row.get(row)
        if stops is not None and batch.sample_positions[i] < slots.min_tokens[row]:
            logits[i].index_fill_(0, torch.from_numpy(stops).to(logits.device), -torch.inf)
        bad_words = slots.bad_words_by_row.get(row)
        if bad_words is not None:
            output = rows.token_ids[row, rows.num_prompt_tokens[row] : batch.sample_num_tokens[i]]
            forbidden = torch.from_numpy(bad_words.forbidden_after(output))
            logits[i].index_fill_(0, forbidden.to(logits.device), -torch.inf)


def _penalize(logits: torch.Tensor, rows: InputBatch, row: int, num_tokens: int) -> None:
    """Penalties of one row; logits is [vocab_size]."""
    slots = rows.slots
    tokens = rows.token_ids[row, :num_tokens]
    seen = np.unique(tokens)
    ids = torch.from_numpy(seen.astype(np.int64)).to(logits.device)
    values = logits.index_select(0, ids)
    repetition = float(slots.repetition_penalty[row])
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits.index_copy_(0, ids, values)

    output, counts = np.unique(tokens[rows.num_prompt_tokens[row] :], return_counts=True)
    if len(output):
        loss = slots.presence_penalty[row] + slots.frequency_penalty[row] * counts
        ids = torch.from_numpy(output.astype(np.int64)).to(logits.device)
        logits.index_add_(0, ids, torch.from_numpy(-loss.astype(np.float32)).to(logits.device))
