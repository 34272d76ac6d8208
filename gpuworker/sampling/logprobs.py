"""Log probabilities of the model's own distribution: before bias, penalties and temperature."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.core.plan import LogprobColumns
from gpuworker.device.transfers import Transfers


def start_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, transfers: Transfers
) -> LogprobColumns:
    """Launches the log probabilities of the chosen and the likeliest tokens, and their copy.

    Args:
        logits: [num_rows, vocab_size] float32, the unedited output of the model.
        token_ids: [num_rows] int64 the chosen tokens.
        num_top: how many of the likeliest tokens to report.
        transfers: copies to the host.

    Returns:
        Columns that are valid once an event recorded later has passed.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogprobColumns(
        token_ids=transfers.to_host(token_ids.int()).numpy(),
        logprobs=transfers.to_host(chosen.squeeze(1)).numpy(),
        ranks=transfers.to_host(((logprobs > chosen).sum(1) + 1).int()).numpy(),
        top_token_ids=transfers.to_host(top.indices.int()).numpy(),
        top_logprobs=transfers.to_host(top.values).numpy(),
    )


def take(columns: LogprobColumns, index: slice, num_top: int) -> LogprobColumns:
    """The columns of a slice of tokens, cut to the num_top likeliest tokens."""
    return LogprobColumns(
        columns.token_ids[index],
        columns.logprobs[index],
        columns.ranks[index],
        columns.top_token_ids[index, :num_top],
        columns.top_logprobs[index, :num_top],
    )


def join(parts: list[LogprobColumns]) -> LogprobColumns:
    """Concatenates columns by token; all parts must have the same number of likeliest tokens."""

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return LogprobColumns(*(column(field.name) for field in fields(LogprobColumns)))
