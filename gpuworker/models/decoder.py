"""The decoder of all model families: embedding, layers of attention and gated MLP, head.

The decoder runs a step's flat mixed batch in one pass; it knows neither requests nor the schedule.
The work between matrix products and attention is in `gpuworker.kernels.ops`, by device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpuworker.attention.interface import AttentionLayer, LayerKv, PreparedStep
from gpuworker.kernels.ops import HeadNorms, Ops, RopeTables, StepTokens
from gpuworker.models.config import ModelConfig
from gpuworker.models.embedding import Embedding
from gpuworker.models.linear import Added, Linear
from gpuworker.models.mlp import Mlp
from gpuworker.models.rope import rope_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a layer; norms are float32, [hidden_size].

    qkv: query, key and value rows in this order.
    """

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    attention_output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Weights of a model."""

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    head: Linear


class Decoder:
    """A decoder-only model.

    Args:
        config: the model's configuration.
        weights: in the compute type, on the model's device.
        ops: the operations for that device.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops) -> None:
        self.config = config
        self._weights = weights
        self._ops = ops
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        # The scale is rounded to the compute type, as the embedding is.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._layers = self._with_kinds(weights.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKv],
        attention: PreparedStep,
    ) -> torch.Tensor:
        """Hidden states of every token after the final norm; writes keys and values to `kv`.

        Args:
            token_ids: [num_padded_tokens].
            positions: [num_padded_tokens].
            kv: one pool per layer.
            attention: the step, prepared by the backend.

        Returns:
            [num_padded_tokens, hidden_size].
        """
        residual = self._weights.embedding(token_ids)
        if self._embedding_scale != 1.0:
            residual = residual.mul_(self._embedding_scale)
        tokens = StepTokens(positions, attention)
        update = None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            weights = layer.weights
            normed = self._norm(residual, update, weights.input_norm)
            attended = self._attend(layer, normed, layer_kv, tokens)
            residual, update = self._add(
                residual, attended, weights.attention_output, weights.post_attention_norm
            )
            normed = self._norm(residual, update, weights.mlp_norm)
            residual, update = self._add(residual, normed, weights.mlp, weights.post_mlp_norm)
        return self._norm(residual, update, self._weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits of rows of hidden states: [num_rows, vocab_size] float32."""
        logits = self._weights.head(hidden).float()
        cap = self.config.final_soft_cap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _attend(
        self, layer: "_DecoderLayer", normed: torch.Tensor, kv: LayerKv, tokens: StepTokens
    ) -> torch.Tensor:
        """Attention without the output projection: [num_tokens, num_heads * head_dim]."""
        shape = self.config.attention
        qkv = layer.weights.qkv(normed).view(
            -1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        )
        query = self._ops.rotate_and_write(qkv, kv, tokens, layer.weights.head_norms, layer.rope)
        attended = tokens.attention.attend(query, kv, layer.attention)
        return attended.reshape(-1, shape.num_heads * shape.head_dim)

    def _add(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        output: Linear | Mlp,
        norm: torch.Tensor | None,
    ) -> Added:
        """Adds a block's output to the residual, or returns both terms; a post norm comes first."""
        if norm is None:
            return output.add_to(residual, x)
        return residual, self._norm(output(x), None, norm)

    def _norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        return self._ops.add_rms_norm(residual, update, weight, self.config.norm_eps)

    def _with_kinds(self, layers: Sequence[LayerWeights]) -> list["_DecoderLayer"]:
        """Joins each layer's weights with its configuration."""
        config = self.config
        ropes = {
            rope: rope_tables(rope, config.max_model_len, self.device)
            for rope in {layer.rope for layer in config.layers}
            if rope is not None
        }
        return [
            _DecoderLayer(
                weights,
                AttentionLayer(
                    config.attention.scale, layer.sliding_window, config.attention.soft_cap
                ),
                None if layer.rope is None else ropes[layer.rope],
            )
            for weights, layer in zip(layers, config.layers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    """A layer's weights and kind."""

    weights: LayerWeights
    attention: AttentionLayer
    rope: RopeTables | None
