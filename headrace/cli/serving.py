"""The options and the configuration of services that `serve` and `demo` share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure
from headrace.cli.options import all_of

if TYPE_CHECKING:
    from headrace.cli.progress import ProgressSteps
    from headrace.local import LocalConfig, LocalError


DEFAULT_MODEL = "smollm2-135m-instruct"

_MODEL = (
    click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default=True,
        help="A built-in name (smollm2-135m-instruct, gemma3-270m), a GGUF file, a Hugging Face"
        " folder, or owner/name on the hub.",
    ),
    click.option("--model-name", default="", help="Name in requests.  [default: its own]"),
    click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True,
                 help="Gpuworkers to start."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Model's device."),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                 help="Data type of the model."),
    click.option("--max-model-len", type=int, help="Most tokens of a request, with output."),
    click.option("--max-num-seqs", type=int, help="Most requests in one step."),
    click.option("--max-num-batched-tokens", type=int, help="Most tokens in one step."),
    click.option("--block-size", type=int, help="Tokens in one KV block."),
    click.option("--num-kv-blocks", type=int, help="KV blocks.  [default: what memory allows]"),
    click.option("--kv-cache-memory-bytes", type=int,
                 help="Size of the KV pool in bytes, instead of --num-kv-blocks."),
    click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True),
                 help="Share of a GPU's memory to use."),
    click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]),
                 help="Data type of keys and values."),
    click.option("--num-spec-tokens", type=click.IntRange(min=0),
                 help="Speculative tokens by prompt lookup, per request and step; 0: none."),
    click.option("--otlp-endpoint", help="OTLP collector for traces, e.g. http://127.0.0.1:4317."),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
                 help="Least severe log line of the services to show.  [default: warning]"),
)  # fmt: skip

_WORKER_FLAGS = (
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "num_spec_tokens",
)


model_options = all_of(_MODEL)


def make_config(
    arguments: dict[str, Any], steps: "ProgressSteps", *, file: Path | None = None, **changed: Any
) -> "LocalConfig":
    """The services that the model options describe; the model is fetched if need be. Blocks.

    file has the services' settings, which come before the defaults of flags here.
    """
    from headrace.local import LocalConfig
    from headrace.service.config import is_set
    from headrace.service.model_files import ModelFilesError, resolve

    model = arguments["model"]
    try:
        path = resolve(model, steps.fetched)
    except ModelFilesError as error:
        raise Failure(str(error)) from error
    log_level = arguments["log_level"]
    if not log_level and not is_set("log_level", section="process", file=file, environ=os.environ):
        log_level = "warning"
    given = {name: arguments[name] for name in _WORKER_FLAGS if arguments[name] is not None}
    return LocalConfig(
        model_path=path,
        model_name=arguments["model_name"] or _name_of(model, path),
        num_workers=arguments["workers"],
        worker_flags=flags(given),
        shared_flags=[
            *flags({"log_level": log_level, "otlp_endpoint": arguments["otlp_endpoint"]}),
            *flags({"config": file}),
        ],
        **changed,
    )


def ended(error: "LocalError") -> Failure:
    """The failure for a service that ended; its log has been shown."""
    return Failure(error.summary + ("; its log is above" if error.last_lines else ""))


def flags(values: dict[str, Any]) -> Sequence[str]:
    """Command-line flags for the values that are given."""
    return [
        part
        for name, value in values.items()
        if value not in {None, ""}
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def _name_of(model: str, path: Path) -> str:
    """The name of a built-in or hub model, or the last part of a path."""
    return path.stem if path.is_file() and Path(model).exists() else Path(model).name
