"""Builds a decoder from a weight source: checks, fuses, converts and moves every tensor.

Besides the model, at most one source tensor is held in memory at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gpuworker.kernels.choice import ops_for
from gpuworker.kernels.ops import HeadNorms, Ops
from gpuworker.models.config import AttentionConfig, ExpertsConfig, ModelConfig
from gpuworker.models.decoder import Decoder, LayerWeights, ModelWeights
from gpuworker.models.embedding import Embedding, EmbeddingTable, StoredEmbedding
from gpuworker.models.errors import WeightError
from gpuworker.models.experts import (
    GroupedExperts,
    ListedExperts,
    MixtureMlp,
    has_grouped_product,
)
from gpuworker.models.linear import Linear, is_repacked, make_linear
from gpuworker.models.mlp import GatedMlp, Mlp
from gpuworker.models.source import WeightSource

ReportCount = Callable[[int, int], None]
"""Called with the number of items done so far and the total number."""

# Tensors that follow from the configuration, but that some checkpoints store.
_REDUNDANT_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")


def load_decoder(
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: ReportCount,
    ops: Ops | None = None,
) -> Decoder:
    """Reads a whole model.

    Args:
        source: the model's files.
        device: the device to load onto.
        dtype: the compute type.
        progress: called after each tensor.
        ops: the operations between products; by default `ops_for(device)`.

    Raises:
        WeightError: a tensor is missing, unknown or of a wrong shape; the message names the tensor.
    """
    ops = ops or ops_for(device)
    loader = _Loader(source, (device, dtype), progress, ops)
    weights = loader.model()
    loader.refuse_leftovers()
    return Decoder(source.config, weights, ops)


class _Loader:
    def __init__(
        self,
        source: WeightSource,
        target: tuple[torch.device, torch.dtype],
        progress: ReportCount,
        ops: Ops,
    ) -> None:
        self._source = source
        self._device, self._dtype = target
        self._progress = progress
        self._ops = ops
        self._names = source.names()
        self._read: set[str] = set()

    def model(self) -> ModelWeights:
        config = self._source.config
        embedding, head = self._embedding_and_head(config)
        return ModelWeights(
            embedding=embedding,
            layers=[self._layer(config, i) for i in range(len(config.layers))],
            final_norm=self._norm("model.norm", config.hidden_size),
            head=head,
        )

    def _embedding_and_head(self, config: ModelConfig) -> tuple[Embedding, Linear]:
        name, shape = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        table = self._tensor(name, shape)
        if config.tie_embeddings:
            head = make_linear(table, None)
            self._read.add("lm_head.weight")
        else:
            head = make_linear(self._tensor("lm_head.weight", shape), None)
        if not is_repacked(self._device, self._dtype):
            return EmbeddingTable(table), head
        # The head has its own repacked copy, so the embedding keeps its rows in the stored type.
        del table
        rows = self._source.stored_rows(name)
        if rows is None:
            return EmbeddingTable(self._source.read(name).to(self._dtype)), head
        return StoredEmbedding(rows, self._dtype), head

    def refuse_leftovers(self) -> None:
        """Rejects a file with tensors that were not read: the file has another kind of model."""
        leftovers = sorted(
            name for name in self._names - self._read if not name.endswith(_REDUNDANT_SUFFIXES)
        )
        if leftovers:
            raise WeightError(
                f"tensor {leftovers[0]!r} is not part of a {self._source.config.family} model "
                f"({len(leftovers)} such tensors)"
            )

    def _layer(self, config: ModelConfig, index: int) -> LayerWeights:
        layer = f"model.layers.{index}"
        hidden, attention = config.hidden_size, config.attention
        query_rows = attention.num_heads * attention.head_dim
        kv_rows = attention.num_kv_heads * attention.head_dim
        before_mlp, after_attention = "post_attention_layernorm", None
        if config.has_post_norms:
            before_mlp, after_attention = "pre_feedforward_layernorm", "post_attention_layernorm"
        return LayerWeights(
            input_norm=self._norm(f"{layer}.input_layernorm", hidden),
            qkv=self._fused(
                f"{layer}.self_attn",
                {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows},
                "qkv_proj",
                hidden,
                attention.qkv_bias,
            ),
            head_norms=self._head_norms(f"{layer}.self_attn", attention),
            attention_output=self._linear(
                f"{layer}.self_attn.o_proj", (hidden, query_rows), attention.output_bias
            ),
            post_attention_norm=self._optional_norm(
                f"{layer}.{after_attention}", hidden if after_attention else None
            ),
            mlp_norm=self._norm(f"{layer}.{before_mlp}", hidden),
            mlp=self._mlp(layer, config, config.layers[index].experts),
            post_mlp_norm=self._optional_norm(
                f"{layer}.post_feedforward_layernorm", hidden if config.has_post_norms else None
            ),
        )

    def _mlp(self, layer: str, config: ModelConfig, experts: ExpertsConfig | None) -> Mlp:
        prefix, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if experts is None:
            return self._gated(prefix, config, config.intermediate_size, names)
        if f"{layer}.block_sparse_moe.gate.weight" in self._names:
            prefix, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
        router = self._linear(f"{prefix}.gate", (experts.num_experts, config.hidden_size), False)
        is_cpu = self._device.type == "cpu"
        make_experts = self._listed_experts if is_cpu else self._grouped_experts
        return MixtureMlp(
            router,
            make_experts(f"{prefix}.experts", config, experts, names),
            num_per_token=experts.num_per_token,
            is_normalized=experts.is_normalized,
        )

    def _listed_experts(
        self, prefix: str, config: ModelConfig, experts: ExpertsConfig, names: tuple[str, str, str]
    ) -> ListedExperts:
        size = experts.intermediate_size
        return ListedExperts(
            [self._gated(f"{prefix}.{i}", config, size, names) for i in range(experts.num_experts)]
        )

    def _grouped_experts(
        self, prefix: str, config: ModelConfig, experts: ExpertsConfig, names: tuple[str, str, str]
    ) -> GroupedExperts:
        """Fills one stacked tensor per product, holding one expert's source weights at a time."""
        count, hidden, size = experts.num_experts, config.hidden_size, experts.intermediate_size
        gate_name, up_name, down_name = names
        # Checks the last expert before allocating: the configuration's sizes may be wrong.
        self._tensor(f"{prefix}.{count - 1}.{down_name}.weight", (hidden, size))
        gate_up = torch.empty(count, 2 * size, hidden, device=self._device, dtype=self._dtype)
        down = torch.empty(count, hidden, size, device=self._device, dtype=self._dtype)
        for i in range(count):
            expert = f"{prefix}.{i}"
            gate_up[i, :size] = self._tensor(f"{expert}.{gate_name}.weight", (size, hidden))
            gate_up[i, size:] = self._tensor(f"{expert}.{up_name}.weight", (size, hidden))
            down[i] = self._tensor(f"{expert}.{down_name}.weight", (hidden, size))
        return GroupedExperts(
            gate_up,
            down,
            partial(self._ops.gate, activation=config.activation),
            is_grouped_in_graphs=has_grouped_product(self._device, self._dtype),
        )

    def _gated(
        self, prefix: str, config: ModelConfig, size: int, names: tuple[str, str, str]
    ) -> GatedMlp:
        """A gated MLP of intermediate size `size`; names: its gate, up and down tensors."""
        gate, up, down = names
        hidden = config.hidden_size
        return GatedMlp(
            self._fused(prefix, {gate: size, up: size}, "gate_up_proj", hidden, config.mlp_bias),
            self._linear(f"{prefix}.{down}", (hidden, size), config.mlp_bias),
            config.activation,
            self._ops,
        )

    def _fused(
        self, prefix: str, rows: dict[str, int], fused: str, columns: int, has_bias: bool
    ) -> Linear:
        """One product for several projections, which the file stores separately or fused."""
        if f"{prefix}.{fused}.weight" in self._names:
            rows = {fused: sum(rows.values())}
        weight = torch.cat(
            [self._tensor(f"{prefix}.{name}.weight", (n, columns)) for name, n in rows.items()]
        )
        bias = None
        if has_bias:
            bias = torch.cat(
                [self._tensor(f"{prefix}.{name}.bias", (n,)) for name, n in rows.items()]
            )
        return make_linear(weight, bias)

    def _linear(self, name: str, shape: tuple[int, int], has_bias: bool) -> Linear:
        bias = self._tensor(f"{name}.bias", shape[:1]) if has_bias else None
        return make_linear(self._tensor(f"{name}.weight", shape), bias)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._tensor(f"{name}.weight", (size,), torch.float32)
        return weight + self._source.config.norm_offset

    def _head_norms(self, prefix: str, attention: AttentionConfig) -> HeadNorms | None:
        if not attention.has_qk_norm:
            return None
        query, key = (
            self._norm(f"{prefix}.{name}", attention.head_dim) for name in ("q_norm", "k_norm")
        )
        return HeadNorms(query, key, self._source.config.norm_eps)

    def _optional_norm(self, name: str, size: int | None) -> torch.Tensor | None:
        return None if size is None else self._norm(name, size)

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise WeightError(
                f"tensor {name!r} has shape {list(tensor.shape)}, the configuration says "
                f"{list(shape)}"
            )
        self._read.add(name)
        self._progress(len(self._read), len(self._names))
        return tensor.to(self._device, dtype or self._dtype)


def with_max_model_len(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """The configuration with a shorter context.

    Raises:
        ValueError: max_model_len exceeds the model's own context length.
    """
    if max_model_len is None:
        return config
    if not 0 < max_model_len <= config.max_model_len:
        raise ValueError(
            f"max-model-len must be in [1, {config.max_model_len}] for this model, "
            f"not {max_model_len}"
        )
    return replace(config, max_model_len=max_model_len)
