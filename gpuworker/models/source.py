"""The interface of weight files in any format, with Hugging Face tensor names."""

from pathlib import Path
from typing import Protocol

import torch

from gpuworker.models.checks import check_config
from gpuworker.models.config import ModelConfig
from gpuworker.models.embedding import StoredRows
from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.gguf_file import GgufSource
from gpuworker.models.safetensors_folder import SafetensorsSource


class WeightSource(Protocol):
    """A model on disk.

    Names are those of Hugging Face checkpoints, e.g. `model.layers.0.self_attn.q_proj.weight`.
    """

    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # the stored type of the weights; float32 if they are quantized

    def names(self) -> set[str]:
        """The names of all tensors."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, possibly a read-only view of the file.

        Raises:
            WeightError: the tensor cannot be read completely; the message names the tensor.
        """

    def stored_rows(self, name: str) -> StoredRows | None:
        """A matrix in its stored type, held in memory; None if that type is float32.

        Raises:
            WeightError: the same as for `read`.
        """


def open_source(path: Path) -> WeightSource:
    """Opens a GGUF file or a Hugging Face folder.

    Raises:
        WeightError: the file is damaged or has another format.
        UnsupportedModelError: the decoder cannot run this model.
    """
    try:
        source = SafetensorsSource(path) if path.is_dir() else GgufSource(path)
    except (UnsupportedModelError, WeightError):
        raise
    except KeyError as error:
        raise WeightError(f"{path}: {error} is missing") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value has a wrong type under a key that `check_values` does not cover.
        raise WeightError(
            f"{path} is not as a model should be: {type(error).__name__}: {error}"
        ) from error
    check_config(path.name, source.config, source.eos_token_ids)
    return source
