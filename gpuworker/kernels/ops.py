"""The interface of the operations that a decoder and a sampler run between matrix products.

`twins.TorchOps` implements them in plain torch, for CPUs. `fused.TritonOps` implements each as one
kernel on a GPU. A fused kernel is correct if its result equals that of its torch twin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from gpuworker.attention.interface import LayerKv, PreparedStep

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms on queries and keys, each [head_dim] float32, and their epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class RopeTables:
    """Cosines and sines by position: each [max_model_len, rotary_dim / 2] float32.

    Of a head's leading rotary_dim dimensions, each dimension of the first half is rotated with its
    partner in the second half.
    """

    cosines: torch.Tensor
    sines: torch.Tensor


class StepTokens:
    """The positions and slots of a step's tokens, shared by all layers.

    Args:
        positions: [num_padded_tokens] int64, position of each token in its request.
        attention: the prepared step, which holds the slots.
    """

    def __init__(self, positions: torch.Tensor, attention: PreparedStep) -> None:
        self.positions = positions
        self.attention = attention
        self._rows: dict[RopeTables, tuple[torch.Tensor, torch.Tensor]] = {}

    def rope_rows(self, rope: RopeTables, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' cosines, repeated for both halves, and sines; gathered once per step.

        Returns:
            [num_padded_tokens, 1, rotary_dim] and [num_padded_tokens, 1, rotary_dim / 2].
        """
        rows = self._rows.get(rope)
        if rows is None:
            cosines, sines = (
                table.index_select(0, self.positions).to(dtype).unsqueeze(1)
                for table in (rope.cosines, rope.sines)
            )
            rows = self._rows[rope] = (torch.cat((cosines, cosines), -1), sines)
        return rows


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Values to add to single logits, minus infinity to forbid a token: each [num_edits].

    rows: [num_edits] int32 the sample that each edit is for; negative is padding.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor  # int32
    values: torch.Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Penalties, grammar and temperature by sample; [num_samples] each unless said otherwise.

    Penalties count a request's prompt, its output and the drafts before the sample. A temperature
    of 0 does not scale.
    """

    slots: torch.Tensor  # int32, row of the persistent batch
    output_counts: torch.Tensor  # int16 [num_slots, vocab_size]
    prompt_bits: torch.Tensor  # int32 [num_slots, ceil(vocab_size / 32)]
    grammar_rows: torch.Tensor  # int32, row of grammar_bits or negative
    grammar_bits: torch.Tensor  # int32 [num_grammars, ceil(vocab_size / 32)], allowed tokens
    draft_starts: torch.Tensor  # int32, index in `drafts` of the sample's first draft
    draft_counts: torch.Tensor  # int32
    drafts: torch.Tensor  # int32 [num_drafts]
    numbers: Mapping[str, torch.Tensor]  # of Stage.ADJUST, in the order of `headrace.parameters`


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How tokens are drawn; [num_samples] each. is_drawn 0 takes the likeliest token."""

    seeds: torch.Tensor  # int64, the bits of an unsigned seed
    positions: torch.Tensor  # int64, number of output tokens before the sample
    is_drawn: torch.Tensor  # int32
    numbers: Mapping[str, torch.Tensor]  # of Stage.DRAW, in the order of `headrace.parameters`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A step's samples and drafts by request; [num_reqs] each.

    A request has one draft less than samples, or no drafts and no samples.
    """

    sample_starts: torch.Tensor  # int32, index of the request's first sample
    num_samples: torch.Tensor  # int32
    draft_starts: torch.Tensor  # int32, index in `drafts` of the request's first draft
    drafts: torch.Tensor  # int32 [num_drafts]


class Ops(Protocol):
    """The operations between matrix products."""

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds update to residual, in place, and returns the sum's root-mean-square norm.

        residual, update: [num_tokens, size]; weight: [size] float32. The norm is computed in
        float32 and rounded once.
        """

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up of [num_tokens, 2 * size], gates first: [num_tokens, size]."""

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        kv: LayerKv,
        tokens: StepTokens,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        """Normalizes and rotates queries and keys, and writes keys and values to their slots.

        Args:
            qkv: [num_padded_tokens, num_heads + 2 * num_kv_heads, head_dim].
            kv: the layer's pool, changed in place; values are clamped to its type's range.
            tokens: positions and slots of the tokens.
            norms: None if the model has no query and key norms.
            rope: None if the layer has no rotary embedding.

        Returns:
            Queries, [num_padded_tokens, num_heads, head_dim].
        """

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        """Adds to single logits of [num_samples, vocab_size] float32, in place."""

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        """Applies penalties, grammar, temperature to [num_samples, vocab_size] float32 in place."""

    def sample(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Chooses tokens from [num_samples, vocab_size] float32 logits divided by temperature.

        Returns:
            [num_samples] int32; for a row with NaN logits, any token.
        """

    def accept(self, token_ids: torch.Tensor, verification: Verification) -> torch.Tensor:
        """Number of samples that each request keeps: [num_reqs] int32.

        A request keeps its samples up to and including the first sample that differs from its
        draft; token_ids is [num_samples] int32.
        """
