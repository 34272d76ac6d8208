"""Token ids to hidden states."""

from typing import Protocol

import torch
from torch.nn import functional


class Embedding(Protocol):
    """One row for each token; device and dtype are those of the rows it gives."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of [num_tokens] ids, new in memory: [num_tokens, hidden_size]."""


class EmbeddingTable(Embedding):
    """Rows in the type the model computes in; table is [vocab_size, hidden_size]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.device = table.device
        self.dtype = table.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self._table)


class StoredRows(Protocol):
    """A matrix on the CPU in a narrower type than the model computes in."""

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of [num_rows] int64 indices, in any floating type: [num_rows, num_columns]."""


class StoredEmbedding(Embedding):
    """Rows as the file has them, made wider when they are looked up.

    On a CPU a tied head holds the same numbers repacked for its products, and from that no row can
    be read. Some dozen microseconds per step spare a second copy of what is most of a small model.
    """

    def __init__(self, rows: StoredRows, dtype: torch.dtype) -> None:
        self._rows = rows
        self.device = torch.device("cpu")
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows.read(token_ids).to(self.dtype)
