"""Token ids to hidden states."""

from typing import Protocol

import torch
from torch.nn import functional


class Embedding(Protocol):
    """One row for each token; device and dtype are those of the returned rows."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the rows of [num_tokens] ids: [num_tokens, hidden_size]."""


class EmbeddingTable(Embedding):
    """Rows in the compute type; table is [vocab_size, hidden_size]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.device = table.device
        self.dtype = table.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self._table)


class StoredRows(Protocol):
    """A matrix on the CPU in a narrower type than the compute type."""

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of [num_rows] int64 indices, in any floating type: [num_rows, num_columns]."""


class StoredEmbedding(Embedding):
    """Rows in the file's type, converted to the compute type at each lookup.

    On a CPU, a tied head holds the same matrix repacked for products, and rows cannot be read from
    repacked weights. The conversion takes some dozen microseconds per step and saves a second wide
    copy of the matrix, which is most of a small model.
    """

    def __init__(self, rows: StoredRows, dtype: torch.dtype) -> None:
        self._rows = rows
        self.device = torch.device("cpu")
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows.read(token_ids).to(self.dtype)
