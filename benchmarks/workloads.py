"""Workloads: when each request arrives, its prompt and its number of output tokens.

Synthetic loads are a function of their seed. Public traces are read from files that the user has:
Azure's LLM inference traces (CSV) and Mooncake's conversations (JSONL). Traces hold lengths, not
texts; prompts are generated, with the shared prefixes that a Mooncake trace states.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

# Smaller ids are special tokens and single bytes in most vocabularies.
_FIRST_TOKEN_ID = 300
# Tokens per hash id of a Mooncake trace, unless the file states another block size.
_MOONCAKE_BLOCK_TOKENS = 512


class WorkloadError(ValueError):
    """A trace file cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. at_s counts from the start of the run.

    prefix_ids: ids of the prompt's blocks of block_tokens each; equal ids mean equal blocks.
    Empty when nothing is shared.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = _MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How a trace is scaled to a server: time runs `speed` times as fast, lengths shrink.

    max_prompt_tokens and max_output_tokens cap the scaled lengths; 0 is no cap.
    """

    speed: float = 1.0
    tokens: float = 1.0
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times of an open loop, in seconds: `rate` per second on average."""
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def synthetic(
    arrivals: Iterable[float],
    num_prompt_tokens: int,
    num_output_tokens: int,
    spread: float,
    seed: int,
) -> Iterator[Ask]:
    """Requests of about the given lengths, uniformly within +- spread (a fraction) of them."""
    rng = random.Random(seed)

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    for at_s in arrivals:
        yield Ask(at_s, around(num_prompt_tokens), around(num_output_tokens))


def read_trace(path: Path, scale: Scale, limit: int) -> list[Ask]:
    """The first `limit` requests of a trace file, by its suffix: .csv (Azure) or .jsonl (Mooncake).

    Raises:
        WorkloadError: the file has another format, or a line is invalid.
    """
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise WorkloadError(f"{path}: must end in {' or '.join(readers)}")
    try:
        asks = list(islice(reader(path), limit))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    if not asks:
        raise WorkloadError(f"{path}: holds no requests")
    first_s = min(ask.at_s for ask in asks)
    return sorted((_scaled(ask, first_s, scale) for ask in asks), key=lambda ask: ask.at_s)


def prompt_of(ask: Ask, number: int, vocab_size: int, seed: int) -> list[int]:
    """The token ids of a request's prompt; `number` makes the prompt unique in the run."""
    token_ids: list[int] = []
    for prefix_id in ask.prefix_ids:
        if len(token_ids) >= ask.num_prompt_tokens:
            break
        token_ids += _tokens(f"{seed}/block/{prefix_id}", ask.block_tokens, vocab_size)
    missing = ask.num_prompt_tokens - len(token_ids)
    if missing > 0:
        token_ids += _tokens(f"{seed}/request/{number}", missing, vocab_size)
    return token_ids[: ask.num_prompt_tokens]


def _tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(
        range(min(_FIRST_TOKEN_ID, vocab_size - 1), vocab_size), k=count
    )


def _scaled(ask: Ask, first_s: float, scale: Scale) -> Ask:
    return Ask(
        (ask.at_s - first_s) / scale.speed,
        _scaled_length(ask.num_prompt_tokens, scale.tokens, scale.max_prompt_tokens),
        _scaled_length(ask.num_output_tokens, scale.tokens, scale.max_output_tokens),
        ask.prefix_ids,
        _scaled_length(ask.block_tokens, scale.tokens, 0),
    )


def _scaled_length(length: int, factor: float, cap: int) -> int:
    scaled = max(1, round(length * factor))
    return min(scaled, cap) if cap else scaled


def _read_azure(path: Path) -> Iterator[Ask]:
    """Reads the columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise WorkloadError(f"{path}:{number}: {error!r}") from error
            yield Ask(at_s, *lengths)


def _read_mooncake(path: Path) -> Iterator[Ask]:
    """Reads timestamp (ms), input_length, output_length, hash_ids and optional block_size."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                yield Ask(
                    record["timestamp"] / 1000,
                    record["input_length"],
                    record["output_length"],
                    tuple(record["hash_ids"]),
                    record.get("block_size", _MOONCAKE_BLOCK_TOKENS),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise WorkloadError(f"{path}:{number}: {error!r}") from error


def make_sample(num_conversations: int, seed: int) -> Sequence[dict[str, object]]:
    """Records of short conversations, like Mooncake's: each prompt repeats all earlier turns."""
    rng = random.Random(seed)
    block_size = 16
    records: list[dict[str, object]] = []
    next_id = 1
    for _ in range(num_conversations):
        at_ms = rng.randrange(20_000)
        hash_ids = [0]  # the system prompt that all conversations share
        for _ in range(rng.randint(1, 4)):
            num_new = rng.randint(1, 6)
            hash_ids = [*hash_ids, *range(next_id, next_id + num_new)]
            next_id += num_new
            num_output = rng.randint(8, 40)
            records.append(
                {
                    "timestamp": at_ms,
                    "input_length": len(hash_ids) * block_size - rng.randrange(block_size),
                    "output_length": num_output,
                    "hash_ids": hash_ids,
                    "block_size": block_size,
                }
            )
            at_ms += 2_000 + 100 * num_output
    return sorted(records, key=lambda record: int(str(record["timestamp"])))
