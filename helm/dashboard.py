"""The Grafana dashboard of the chart, made from the definitions of the metrics.

Every panel names a Metric and not a string, so a panel of a metric that is gone does not compile.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuworker import metrics as gpuworker
from headrace.service import call_metrics as calls
from headrace.service.exposition import prometheus_name
from headrace.service.metrics import Metric
from headrace.status import metrics as store
from router import metrics as router
from scheduler import metrics as scheduler

_WIDTH, _HEIGHT = 8, 8
_PER_ROW = 3
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; queries are (expression, legend) pairs, unit is Grafana's."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    is_stacked: bool = False


def _chosen(metric: Metric, suffix: str = "", labels: str = "") -> str:
    more = f", {labels}" if labels else ""
    return f'{prometheus_name(metric)}{suffix}{{namespace=~"$namespace"{more}}}'


def _sum(metric: Metric, by: str, labels: str = "") -> str:
    return f"sum by ({by}) ({_chosen(metric, labels=labels)})"


def _rate(metric: Metric, by: str, suffix: str = "") -> str:
    return f"sum by ({by}) (rate({_chosen(metric, suffix)}[{_RATE}]))"


def _percentiles(metric: Metric) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({share}, {_rate(metric, 'le', '_bucket')})", f"p{share * 100:g}")
        for share in (0.5, 0.9, 0.99)
    ]


def _mean(metric: Metric, by: str) -> str:
    return f"{_rate(metric, by, '_sum')} / {_rate(metric, by, '_count')}"


def _share(part: Metric, whole: Metric) -> str:
    return f"{_rate(part, 'worker')} / {_rate(whole, 'worker')}"


ROWS: dict[str, Sequence[Panel]] = {
    "What callers see": [
        Panel("Time to first token", _percentiles(router.TIME_TO_FIRST_TOKEN), "s"),
        Panel("Time per output token", _percentiles(router.TIME_PER_OUTPUT_TOKEN), "s"),
        Panel("Request duration", _percentiles(router.DURATION), "s"),
        Panel("Requests ended", [(_rate(router.ENDED, "reason"), "{{reason}}")], "reqps", True),
        Panel("Requests refused", [(_rate(router.REFUSED, "reason"), "{{reason}}")], "reqps", True),
        Panel(
            "Calls refused unread",
            [(_rate(calls.REFUSED, "job, reason"), "{{job}}, {{reason}}")],
            "reqps",
            True,
        ),
        Panel(
            "Tokens",
            [
                (_rate(router.PROMPT_TOKENS, "model"), "prompt {{model}}"),
                (_rate(router.OUTPUT_TOKENS, "model"), "output {{model}}"),
            ],
        ),
    ],
    "The queue": [
        Panel("Waiting, by tenant", [(_sum(router.QUEUED_REQUESTS, "tenant"), "{{tenant}}")],
              is_stacked=True),
        Panel("Wait until a worker begins", _percentiles(router.QUEUE_TIME), "s"),
        Panel(
            "Waiting at the workers, by reason",
            [(_sum(scheduler.WAITING, "reason"), "{{reason}}")],
            is_stacked=True,
        ),
    ],
    "Steps": [
        Panel("Token budget, by use", [(_rate(scheduler.STEP_TOKENS, "use"), "{{use}}")],
              is_stacked=True),
        Panel("Step duration", _percentiles(scheduler.STEP_DURATION), "s"),
        Panel(
            "Time between steps",
            [
                (_mean(scheduler.STEP_GAP, "worker"), "scheduler, {{worker}}"),
                (_mean(gpuworker.STEP_GAP, "instance"), "worker, {{instance}}"),
            ],
            "s",
        ),
        Panel("KV blocks, by owner", [(_sum(scheduler.KV_BLOCKS, "owner"), "{{owner}}")],
              is_stacked=True),
        Panel(
            "Prefix cache hits",
            [
                (
                    _share(scheduler.HIT_TOKENS, scheduler.QUERIED_TOKENS),
                    "{{worker}}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Drafts accepted",
            [
                (
                    _share(scheduler.ACCEPTED_DRAFT_TOKENS, scheduler.DRAFT_TOKENS),
                    "{{worker}}",
                )
            ],
            "percentunit",
        ),
    ],
    "Trouble": [
        Panel("Preemptions", [(_rate(scheduler.PREEMPTIONS, "worker"), "{{worker}}")], "reqps"),
        Panel(
            "Tokens computed again", [(_rate(scheduler.RECOMPUTED_TOKENS, "cause"), "{{cause}}")]
        ),
        Panel(
            "Recoveries",
            [
                (_rate(router.TAKEN_UP, "by"), "taken up by {{by}}"),
                (_rate(scheduler.RECOVERED, "job"), "on another worker"),
                (_rate(scheduler.LOST_WORKERS, "worker"), "lost {{worker}}"),
                (_rate(router.LOST_SCHEDULERS, "job"), "lost schedulers"),
            ],
        ),
        Panel("Workers", [(_sum(scheduler.WORKERS, "state"), "{{state}}")], is_stacked=True),
        Panel("Store lag", [(f"max by (job) ({_chosen(store.LAG)})", "{{job}}")], "s"),
        Panel(
            "Store: refused items", [(_rate(store.REFUSED, "job"), "{{job}}")]
        ),
    ],
}  # fmt: skip


def page() -> str:
    """The dashboard as JSON, to be imported into Grafana."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": _place(0, top, 24, 1)})
        top += 1
        for index, panel in enumerate(row):
            left, down = index % _PER_ROW * _WIDTH, index // _PER_ROW * _HEIGHT
            panels.append(_panel(panel, _place(left, top + down, _WIDTH, _HEIGHT)))
        top += -(-len(row) // _PER_ROW) * _HEIGHT
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return json.dumps(_dashboard(panels), indent=1) + "\n"


def _dashboard(panels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    namespaces = f"label_values({prometheus_name(router.LIVE)}, namespace)"
    return {
        "uid": "headrace",
        "title": "Headrace",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "namespace",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": namespaces,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": panels,
    }


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
