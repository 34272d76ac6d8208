"""Checks sampling settings; routers and schedulers both check them.

A worker refuses a plan as a whole, so one invalid setting would fail every request of the step.
Routers check what clients send, and schedulers check what routers send.
"""

from typing import NoReturn

from headrace.parameters import PARAMETERS
from headrace.service.errors import invalid
from headrace.v1 import common_pb2

MAX_N = 16
_MAX_LOGPROBS = 20
_MAX_LOGIT_BIAS = 1024
_MAX_BIAS = 100.0


def check_values(sampling: common_pb2.SamplingParams) -> None:
    """Checks everything that needs no tokenizer and no vocabulary.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the first field that is wrong.
    """
    _check_numbers(sampling)
    _check_lengths(sampling)
    _check_biases(sampling)


def refuse(name: str, must: str, value: float) -> NoReturn:
    """Raise for a setting."""
    raise invalid(f"sampling.{name}", f"{must}, is {value:g}")


def _check_numbers(sampling: common_pb2.SamplingParams) -> None:
    for parameter in PARAMETERS:
        name = parameter.name
        if sampling.HasField(name) and not parameter.allows(getattr(sampling, name)):  # type: ignore[arg-type]
            refuse(name, parameter.must, getattr(sampling, name))


def _check_lengths(sampling: common_pb2.SamplingParams) -> None:
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens < 1:
            refuse("max_tokens", "must be at least 1; leave it out for all that fits", 0)
        if sampling.min_tokens > sampling.max_tokens:
            refuse("min_tokens", "must not be above max_tokens", sampling.min_tokens)
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_N:
        refuse("n", f"must be between 1 and {MAX_N}", sampling.n)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value > _MAX_LOGPROBS:
            refuse(name, f"must be at most {_MAX_LOGPROBS}", value)


def _check_biases(sampling: common_pb2.SamplingParams) -> None:
    if len(sampling.logit_bias) > _MAX_LOGIT_BIAS:
        refuse(
            "logit_bias", f"must have at most {_MAX_LOGIT_BIAS} entries", len(sampling.logit_bias)
        )
    for token_id in sampling.logit_bias:
        bias = sampling.logit_bias[token_id]
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            refuse(f"logit_bias[{token_id}]", "must be between -100 and 100", bias)
