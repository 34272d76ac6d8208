"""What is to be checked: from flags, and from the settings of a service that connects to it."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from headrace.doctor.findings import Report
from headrace.doctor.services import check_all
from headrace.doctor.store import check_store
from headrace.service.channels import ChannelConfig
from headrace.service.config import ConfigError, load
from headrace.service.versions import version


@dataclass(frozen=True, slots=True)
class Targets:
    """Addresses, and how each kind of service is called."""

    routers: list[str]
    schedulers: list[str]
    workers: list[str]
    store_url: str
    router_channel: ChannelConfig
    scheduler_channel: ChannelConfig
    worker_channel: ChannelConfig


class _Connected(msgspec.Struct):
    """What the settings of a router or scheduler name; other settings are theirs."""

    scheduler: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    store_url: str = ""


def add_config(targets: Targets, file: Path) -> Targets:
    """The targets with those that the settings file of a router or a scheduler names."""
    channel = load(ChannelConfig, section="channel", file=file)
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        router = msgspec.convert(document.get("router", {}), _Connected)
        scheduler = msgspec.convert(document.get("scheduler", {}), _Connected)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if router.scheduler:
        targets = replace(
            targets,
            schedulers=[*targets.schedulers, *router.scheduler],
            scheduler_channel=channel,
        )
    if scheduler.worker:
        targets = replace(
            targets, workers=[*targets.workers, *scheduler.worker], worker_channel=channel
        )
    url = targets.store_url or router.store_url or scheduler.store_url
    return replace(targets, store_url=url)


async def check(targets: Targets) -> Report:
    """All findings."""
    report = Report(versions={"this command": version()})
    await check_all(
        [(address, targets.router_channel) for address in targets.routers],
        [(address, targets.scheduler_channel) for address in targets.schedulers],
        [(address, targets.worker_channel) for address in targets.workers],
        report,
    )
    if targets.store_url:
        await check_store(targets.store_url, report)
    report.compare()
    return report
