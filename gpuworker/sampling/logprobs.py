"""Log probabilities of the model's own distribution: before bias, penalties and temperature."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.core.plan import LogprobColumns


def logprob_columns(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobColumns:
    """Log probabilities of chosen tokens and of the likeliest ones.

    Args:
        logits: [num_rows, vocab_size] float32, as the model gave them.
        token_ids: [num_rows] int64 the chosen tokens.
        num_top: how many of the likeliest tokens to report.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogprobColumns(
        token_ids=token_ids.cpu().numpy().astype(np.int32),
        logprobs=chosen.squeeze(1).cpu().numpy(),
        ranks=((logprobs > chosen).sum(1) + 1).cpu().numpy().astype(np.int32),
        top_token_ids=top.indices.cpu().numpy().astype(np.int32),
        top_logprobs=top.values.cpu().numpy(),
    )


def take(columns: LogprobColumns, index: slice, num_top: int) -> LogprobColumns:
    """Some tokens' columns, with fewer of the likeliest."""
    return LogprobColumns(
        columns.token_ids[index],
        columns.logprobs[index],
        columns.ranks[index],
        columns.top_token_ids[index, :num_top],
        columns.top_logprobs[index, :num_top],
    )


def join(parts: list[LogprobColumns]) -> LogprobColumns:
    """Tokens of several columns, one after the other; all report equally many likeliest ones."""

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return LogprobColumns(*(column(field.name) for field in fields(LogprobColumns)))
