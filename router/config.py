"""The router's settings."""

from typing import Annotated

import msgspec

from headrace.service.config import help_text
from router.core.global_queue import Policy


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a router serves, where it sends it, and how much may wait in it."""

    router_id: Annotated[
        str, help_text("Name of this router in logs and traces; empty is the host's name.")
    ] = ""
    scheduler: Annotated[tuple[str, ...], help_text("host:port of a scheduler.")] = ()
    model: Annotated[
        str, help_text("Where the tokenizer is: a model folder, a GGUF file, or a model's name.")
    ] = ""
    model_name: Annotated[
        str, help_text("Name that requests use for the model; empty is `model`'s last part.")
    ] = ""
    store_url: Annotated[
        str, help_text("Status store: redis://, rediss:// or unix://; empty keeps no status.")
    ] = ""
    policy: Annotated[Policy, help_text("Order of waiting requests.")] = "fcfs"
    max_queued_requests: Annotated[
        int, help_text("Completions that may wait here, at most; more are refused.")
    ] = 4096
    max_queued_tokens: Annotated[
        int, help_text("Prompt tokens that may wait here, at most; more are refused.")
    ] = 8_000_000
    max_prompt_bytes: Annotated[int, help_text("Largest prompt taken, in bytes of text.")] = (
        4 * 1024 * 1024
    )
    waiting_allowance: Annotated[
        int, help_text("Requests sent to a worker beyond its max_num_seqs, to wait there.")
    ] = 8
    max_report_age_s: Annotated[
        float, help_text("A scheduler that is silent for this long gets no new requests.")
    ] = 5.0
