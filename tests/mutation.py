"""Mutations of files for fuzzing, and a process with little memory and time to read them in."""

import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Numbers around which readers break.
_EXTREMES = (0, 1, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_JSON_VALUES = (
    *(None, True, -1, 0, 1, 7, 2**31, 10**9, 2**64, 1e-300, 1e300, float("inf"), float("nan")),
    *("", "x", [], [0], [[]], [1, 2, 3], {}, {"a": 1}, "\ud800", "(a+)+$"),
)
_MAX_NEW_BYTES = 2 << 30


def mutated(rng: random.Random, content: bytes, head: int) -> bytes:
    """Content with one to four changes, most of them within its first `head` bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(head, len(data)) if rng.random() < 0.9 else len(data))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 8] = struct.pack("<Q", rng.choice(_EXTREMES))
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES) & 0xFFFFFFFF)
            case 3:
                del data[at : at + rng.randint(1, 16)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 64)]
            case 5 if rng.random() < 0.2:
                del data[at:]
            case _:
                data[at] = rng.randrange(256)
        if not data:
            return bytes(data)
    return bytes(data)


def mutated_json(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one value, somewhere, is another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(rng, value[at]), *value[at + 1 :]]
    return rng.choice(_JSON_VALUES)


def limit_process(cpu_s: int) -> None:
    """Lets this process take so much CPU time, and 2 GiB of address space more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize() + _MAX_NEW_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))


def read_all(
    count: int, make: Callable[[int], Any], read: Callable[[], None], expected: tuple[type, ...]
) -> None:
    """Makes and reads `count` inputs; prints how many were read and how many refused.

    Raises:
        AssertionError: an input was refused otherwise than by an expected error; names its seed.
    """
    num_read = 0
    for seed in range(count):
        make(seed)
        try:
            read()
            num_read += 1
        except expected:
            continue
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    print(f"{num_read} read, {count - num_read} refused")
