"""What a decoder and a sampler do between matrix products, behind one interface.

`twins.TorchOps` does it in plain torch and is what a CPU runs; `fused.TritonOps` does each in one
pass on a GPU. A fused kernel is right when it equals its twin.
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
    """Rotation by position: each [max_model_len, rotary_dim / 2] float32.

    The first half of a head's leading rotary_dim dimensions turns with the second.
    """

    cosines: torch.Tensor
    sines: torch.Tensor


class TokenPlaces:
    """Where a step's tokens stand, for all its layers.

    Args:
        positions: [num_padded_tokens] int64, in their requests.
        attention: the prepared step, which knows their slots.
    """

    def __init__(self, positions: torch.Tensor, attention: PreparedStep) -> None:
        self.positions = positions
        self.attention = attention
        self._rows: dict[RopeTables, tuple[torch.Tensor, torch.Tensor]] = {}

    def rope_rows(self, rope: RopeTables, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' cosines, halves repeated, and sines; gathered once for all layers.

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
    """What is added to single logits, minus infinity to forbid: each [num_edits].

    rows: [num_edits] int32 sample of each; negative is padding.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor  # int32
    values: torch.Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """What changes whole rows of logits; [num_samples] each unless said otherwise.

    A row counts its prompt's tokens, its output's, and the drafts before the sample. A temperature
    of 0 leaves the scale.
    """

    slots: torch.Tensor  # int32, row of the persistent batch
    output_counts: torch.Tensor  # int16 [num_slots, vocab_size]
    prompt_bits: torch.Tensor  # int32 [num_slots, ceil(vocab_size / 32)]
    grammar_rows: torch.Tensor  # int32, row of grammar_bits or negative
    grammar_bits: torch.Tensor  # int32 [num_grammars, ceil(vocab_size / 32)], what may come
    draft_starts: torch.Tensor  # int32, where its drafts begin in `drafts`
    draft_counts: torch.Tensor  # int32
    drafts: torch.Tensor  # int32 [num_drafts]
    numbers: Mapping[str, torch.Tensor]  # of Stage.ADJUST, in the order of `headrace.parameters`


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How tokens are drawn; [num_samples] each. Where not is_drawn the likeliest is taken."""

    seeds: torch.Tensor  # int64, the bits of an unsigned seed
    positions: torch.Tensor  # int64, how many output tokens precede
    is_drawn: torch.Tensor  # int32
    numbers: Mapping[str, torch.Tensor]  # of Stage.DRAW, in the order of `headrace.parameters`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A step's samples and drafts by request; [num_reqs] each.

    A request has one draft less than samples, or neither.
    """

    sample_starts: torch.Tensor  # int32, its first sample
    num_samples: torch.Tensor  # int32
    draft_starts: torch.Tensor  # int32, its first draft
    drafts: torch.Tensor  # int32 [num_drafts]


class Ops(Protocol):
    """The passes between products."""

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
        places: TokenPlaces,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        """Normalizes and rotates queries and keys, and writes keys and values to their slots.

        Args:
            qkv: [num_padded_tokens, num_heads + 2 * num_kv_heads, head_dim].
            kv: the layer's pool, changed in place; what does not fit its type is clamped.
            places: of the tokens.
            norms: None where the model has none.
            rope: None where the layer does not rotate.

        Returns:
            Queries, [num_padded_tokens, num_heads, head_dim].
        """

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        """Adds to single logits of [num_samples, vocab_size] float32, in place."""

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        """Penalties, grammar and temperature on [num_samples, vocab_size] float32, in place."""

    def sample(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Chooses tokens from [num_samples, vocab_size] float32 logits over temperature.

        Returns:
            [num_samples] int32; some token where a row's logits are not numbers.
        """

    def accept(self, token_ids: torch.Tensor, verification: Verification) -> torch.Tensor:
        """How many of each request's samples count: [num_reqs] int32.

        Up to and with the first that differs from its draft; token_ids is [num_samples] int32.
        """
