"""What a model recommends for requests that leave sampling fields unset.

Recommendations are in the keys of a Hugging Face generation_config.json; keys that say nothing
about sampling are skipped.
"""

from dataclasses import dataclass, field
from pathlib import Path

from headrace.parameters import PARAMETERS
from headrace.service.errors import ServiceError
from headrace.service.model_files import ModelFilesError, generation_config
from headrace.service.sampling import check_values
from headrace.v1 import common_pb2

# Of a chat request where neither the request nor the model says: an answer, not a book.
DEFAULT_CHAT_MAX_TOKENS = 1024

_FIELD_BY_KEY = {p.name: p.name for p in PARAMETERS if p.is_recommended} | {
    "max_new_tokens": "max_tokens"
}
_WHOLE_NUMBERS = {p.name for p in PARAMETERS if p.is_whole} | {"max_new_tokens"}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Sampling defaults of one model; a field is unset where the model says nothing."""

    sampling: common_pb2.SamplingParams = field(default_factory=common_pb2.SamplingParams)

    def fill_in(self, sampling: common_pb2.SamplingParams) -> None:
        """Set what a request left unset, but for max_tokens.

        A default max_tokens must not make min_tokens of the request an error, so admission applies
        it.
        """
        for descriptor, value in self.sampling.ListFields():
            name = descriptor.name
            if name != "max_tokens" and not sampling.HasField(name):  # type: ignore[arg-type]
                setattr(sampling, name, value)

    def max_tokens(self, *, is_chat: bool) -> int | None:
        """Tokens of a request that does not say; None: as many as fit."""
        if self.sampling.HasField("max_tokens"):
            return self.sampling.max_tokens
        return DEFAULT_CHAT_MAX_TOKENS if is_chat else None


def read_defaults(path: Path) -> ModelDefaults:
    """The defaults of a resolved model.

    Raises:
        ModelFilesError: a value cannot be used; the message names the file and the key.
    """
    config, source = generation_config(path)
    defaults = common_pb2.SamplingParams()
    for key, name in _FIELD_BY_KEY.items():
        if (value := config.get(key)) is not None:
            try:
                _set(defaults, name, value, is_whole=key in _WHOLE_NUMBERS)
            except ValueError as error:
                raise ModelFilesError(f"{source}: {key}: {error}") from error
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise ModelFilesError(f"{source}: do_sample: must be true or false, is {do_sample!r}")
    if do_sample is False:
        # The other values then hold only for callers that switch sampling on.
        defaults.temperature = 0.0
    return ModelDefaults(defaults)


def _set(defaults: common_pb2.SamplingParams, name: str, value: object, *, is_whole: bool) -> None:
    """Set a checked value; ValueError says what it must be."""
    kind = int if is_whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"must be a {'whole ' if is_whole else ''}number, is {value!r}")
    try:
        setattr(defaults, name, value)
        check_values(defaults)
    except ServiceError as error:
        raise ValueError(error.message.partition(": ")[2]) from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"must be in the range of its field, is {value!r:.40}") from error
