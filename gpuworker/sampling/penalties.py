"""Counts the tokens of each row's prompt and output on the device, for penalties.

A step may be launched before the host knows the previous step's tokens, so the counts are kept on
the device. Only rows with penalties are counted. Nothing is allocated before the first such row.
"""

import numpy as np
import torch

from gpuworker.core.plan import AssignedRequest, Int32Array
from gpuworker.device.transfers import Transfers

_MOST = int(np.iinfo(np.int16).max)


class PenaltyState:
    """Token counts of rows with penalties.

    Args:
        max_num_seqs: number of rows.
        vocab_size: the model's vocabulary size.
        device: the sampler's device.
        transfers: copies to the device.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, transfers: Transfers
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._transfers = transfers
        # Placeholders: the kernels read the counts only of rows with penalties.
        self.output_counts = torch.zeros((1, 1), dtype=torch.int16, device=device)
        self.prompt_bits = torch.zeros((1, 1), dtype=torch.int32, device=device)

    def reset_row(self, request: AssignedRequest) -> None:
        """Counts the prompt and output of a request that was newly assigned to its row."""
        if len(self.output_counts) < self._max_num_seqs:
            self._allocate()
        prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
        counts = np.bincount(output, minlength=self._vocab_size)
        counts = np.minimum(counts, _MOST).astype(np.int16)
        self.output_counts[request.row] = self._transfers.to_device(counts)
        self.prompt_bits[request.row] = self._transfers.to_device(self._bits_of(prompt))

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds one output token to the counts of each row: [num_rows] int64 each, rows distinct."""
        index = rows * self._vocab_size + token_ids
        flat = self.output_counts.view(-1)
        counts = flat.index_select(0, index).int().add_(1).clamp_(max=_MOST)
        flat.index_copy_(0, index, counts.to(torch.int16))

    def _allocate(self) -> None:
        self.output_counts = torch.zeros(
            (self._max_num_seqs, self._vocab_size), dtype=torch.int16, device=self._device
        )
        self.prompt_bits = torch.zeros(
            (self._max_num_seqs, _num_words(self._vocab_size)),
            dtype=torch.int32,
            device=self._device,
        )

    def _bits_of(self, token_ids: Int32Array) -> Int32Array:
        """Packs a set of tokens into 32-bit words, one bit per vocabulary entry, lowest first."""
        is_there = np.zeros(32 * _num_words(self._vocab_size), dtype=np.bool_)
        is_there[token_ids] = True
        return np.packbits(is_there, bitorder="little").view(np.int32)


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
