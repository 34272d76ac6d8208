"""The one decoder: embedding, layers of attention and gated MLP, a head.

It runs the flat mixed batch of a step in one pass and knows neither requests nor the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from gpuworker.attention.interface import AttentionLayer, LayerKv, PreparedStep
from gpuworker.models.config import LayerConfig, ModelConfig, Rope
from gpuworker.models.linear import Linear
from gpuworker.models.mlp import Mlp
from gpuworker.models.rope import RopeStep, RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a layer; norms are float32, [hidden_size] or, on queries and keys, [head_dim].

    qkv: query, key and value rows in this order.
    """

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Weights of a model; embedding is [vocab_size, hidden_size]."""

    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    head: Linear


class Decoder:
    """A decoder-only model.

    Args:
        config: what it is made of.
        weights: in the type the model computes in, on its device.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        distinct = {layer.rope for layer in config.layers if layer.rope is not None}
        self._rope_tables = {
            rope: RopeTable(rope, config.max_model_len, self.device) for rope in distinct
        }
        self._attention_layers = [
            AttentionLayer(config.attention.scale, layer.sliding_window, config.attention.soft_cap)
            for layer in config.layers
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKv],
        attention: PreparedStep,
    ) -> torch.Tensor:
        """Hidden states of every token, before the final norm; keys and values go to `kv`.

        Args:
            token_ids: [num_padded_tokens].
            positions: [num_padded_tokens].
            kv: one per layer.
            attention: the step, prepared by the backend.

        Returns:
            [num_padded_tokens, hidden_size].
        """
        hidden = functional.embedding(token_ids, self._weights.embedding)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=self.dtype)
        ropes = {rope: table.at(positions, self.dtype) for rope, table in self._rope_tables.items()}
        for i, layer in enumerate(self._weights.layers):
            config = self.config.layers[i]
            attended = self._attend(layer, hidden, config, _Context(ropes, kv[i], attention, i))
            hidden = self._join(hidden, attended, layer.attention_output, layer.post_attention_norm)
            normed = self._norm(hidden, layer.mlp_norm)
            hidden = self._join(hidden, normed, layer.mlp, layer.post_mlp_norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, float32 [num_rows, vocab_size], of rows of hidden states."""
        logits = self._weights.head(self._norm(hidden, self._weights.final_norm)).float()
        cap = self.config.final_soft_cap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _attend(
        self, layer: LayerWeights, hidden: torch.Tensor, config: LayerConfig, context: "_Context"
    ) -> torch.Tensor:
        """Attention without its output product: [num_tokens, num_heads * head_dim]."""
        shape = self.config.attention
        qkv = layer.qkv(self._norm(hidden, layer.input_norm)).view(
            -1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        )
        # Queries and keys lie next to each other: one rotation serves both.
        num_turned = shape.num_heads + shape.num_kv_heads
        heads, value = qkv[:, :num_turned], qkv[:, num_turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(heads[:, : shape.num_heads], layer.query_norm)
            key = self._norm(heads[:, shape.num_heads :], layer.key_norm)
            heads = torch.cat((query, key), dim=1)
        if config.rope is not None:
            heads = context.ropes[config.rope].rotate(heads)
        query, key = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        context.attention.write(context.kv, key, value)
        attended = context.attention.attend(
            query, context.kv, self._attention_layers[context.layer_index]
        )
        return attended.reshape(-1, shape.num_heads * shape.head_dim)

    def _join(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        output: Linear | Mlp,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds a block's output to the residual stream."""
        if norm is None:
            return output.add_to(hidden, x)
        return hidden + self._norm(output(x), norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, in float32; weight is float32."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.config.norm_eps).rsqrt_()
        return (wide * scale).mul_(weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Context:
    """What a layer's attention needs of the step."""

    ropes: dict[Rope, RopeStep]
    kv: LayerKv
    attention: PreparedStep
    layer_index: int
