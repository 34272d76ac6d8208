"""What follows from the one declaration of a sampling parameter."""

import inspect
import math
from dataclasses import fields

import click
import pytest

from gpuworker.core.plan import SamplingSettings
from gpuworker.core.request_slots import RequestSlots
from gpuworker.rpc import wire
from headrace.cli.app import main
from headrace.parameters import PARAMETERS, Parameter, Stage
from headrace.service.errors import ServiceError
from headrace.service.sampling import check_values
from headrace.types import Sampling
from headrace.v1 import common_pb2, gpuworker_pb2

EACH = pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.name)


def params(parameter: Parameter, value: float) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{parameter.name: value})


@EACH
def test_the_proto_the_client_and_the_flags_have_it(parameter: Parameter) -> None:
    field = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name[parameter.name]
    assert field.has_presence
    assert parameter.name in {f.name for f in fields(Sampling)}
    for command in ("generate", "chat"):
        found = main.get_command(click.Context(main), command)
        assert found is not None
        flags = [flag for option in found.params for flag in option.opts]
        assert "--" + parameter.name.replace("_", "-") in flags


@EACH
def test_every_port_checks_its_range(parameter: Parameter) -> None:
    check_values(params(parameter, parameter.off))
    wrong = [math.nan, math.inf, parameter.high * 1.01, parameter.low - 0.01]
    wrong += [] if parameter.has_low else [parameter.low]
    for value in [] if parameter.is_whole else wrong:
        message = gpuworker_pb2.StepPlan(
            row_requests=[gpuworker_pb2.RowRequest(sampling=params(parameter, value))]
        )
        with pytest.raises(ServiceError, match=rf"sampling\.{parameter.name}: must be"):
            wire.step_plan(message)


@EACH
def test_a_row_has_its_value_or_that_it_is_off(parameter: Parameter) -> None:
    slots = RequestSlots(2, vocab_size=8, eos_token_ids=())
    for row, settings in enumerate(
        (SamplingSettings(), SamplingSettings(**{parameter.name: 1}))  # type: ignore[arg-type]
    ):
        request = wire.AssignedRequest(row, "r", [], 1, settings)  # type: ignore[arg-type]
        slots.occupy(request)
    assert slots.number_by_name[parameter.name].tolist() == [parameter.off, 1]


def test_kernels_take_the_parameters_in_the_order_of_their_declaration() -> None:
    from gpuworker.kernels.device import sampling

    for kernel, stage in (
        (sampling.adjust_logits, Stage.ADJUST),
        (sampling.sample_tokens, Stage.DRAW),
    ):
        taken = list(inspect.signature(kernel.fn).parameters)
        names = [p.name.removesuffix("_penalty") for p in PARAMETERS if p.stage is stage]
        at = [next(i for i, t in enumerate(taken) if t.startswith(name)) for name in names]
        assert at == list(range(at[0], at[0] + len(at)))
