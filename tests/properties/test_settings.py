"""Every number that a service can be told has bounds: a wrong one must not hang its callers."""

import math
from typing import get_type_hints

import msgspec
import pytest

from gpuworker.config import WorkerSettings
from headrace.service.channels import ChannelConfig
from headrace.service.config import ConfigError, load
from headrace.service.serving import ServingConfig
from router.config import RouterConfig, StreamsConfig, TenantConfig
from scheduler.config import PoolSettings, SchedulerSettings

STRUCTS = (
    WorkerSettings,
    SchedulerSettings,
    PoolSettings,
    RouterConfig,
    StreamsConfig,
    TenantConfig,
    ServingConfig,
    ChannelConfig,
)
NUMBERS = [
    pytest.param(struct, name, id=f"{struct.__name__}.{name}")
    for struct in STRUCTS
    for name, kind in get_type_hints(struct).items()
    # What the worker finds out for itself when it is None, it checks itself.
    if kind in {int, float}
]


@pytest.mark.parametrize(("struct", "name"), NUMBERS)
@pytest.mark.parametrize("value", [-1, math.nan])
def test_no_number_may_be_negative_or_none_at_all(
    struct: type[msgspec.Struct], name: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=name):
        load(struct, section="any", overrides={name: value})


def test_a_watermark_that_admits_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="watermark"):
        load(SchedulerSettings, section="scheduler", overrides={"watermark": 1.0})
