"""API keys: who a caller is, by the key that the call carries.

Services know the SHA-256 of each key, from a TOML file, never the key. A key is 256 random bits, so
nobody can guess it from its hash, and a slow hash would only make every call slow. Keys are found
by their hash: the time of a look-up tells nothing about any key.
"""

import hashlib
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.service.config import ConfigError
from headrace.service.tls import read_tokens
from headrace.service.watched import Watched

_PREFIX = "headrace_"
_NUM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one key, beside those of its tenant; 0 is no limit."""

    max_live_requests: Annotated[int, msgspec.Meta(ge=0)] = 0
    requests_per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    tokens_per_minute: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Smaller is more urgent: a request with a smaller priority is refused.
    min_priority: int | None = None


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section [keys.ID] of a file of keys."""

    sha256: str
    # Exactly one of these: whose requests the key may make and see, or everybody's.
    tenant: str = ""
    admin: bool = False
    expires: datetime | None = None
    limits: KeyLimits = KeyLimits()

    def is_expired(self) -> bool:
        """Whether the key counts no more."""
        return self.expires is not None and self.expires.timestamp() <= time.time()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, ApiKey] = {}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a call comes from; without a tenant an administrator, who acts for every tenant."""

    key_id: str
    tenant: str = ""
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def is_admin(self) -> bool:
        """Whether the caller may act for all tenants, and see the pool."""
        return not self.tenant


# A server that asks for no key trusts every caller.
ANYBODY = Caller("")


class KeyRing:
    """The keys that a server accepts."""

    def __init__(self, tokens: Iterable[str], keys: Mapping[str, ApiKey]) -> None:
        """A token is the key of an administrator."""
        admin = {_digest(token): (Caller("token"), None) for token in tokens}
        self._by_digest: dict[bytes, tuple[Caller, ApiKey | None]] = admin | {
            bytes.fromhex(key.sha256): (Caller(key_id, key.tenant, key.limits), key)
            for key_id, key in keys.items()
        }

    def find(self, secret: bytes) -> tuple[Caller, ApiKey | None] | None:
        """The caller whose key or token this is, expired or not."""
        return self._by_digest.get(hashlib.sha256(secret).digest())


def watch_keys(token_file: str, keys_file: str) -> Watched[KeyRing] | None:
    """The keys in the files, kept up to date; None if there is no file. Raises ConfigError."""
    if not token_file and not keys_file:
        return None

    def read() -> KeyRing:
        tokens = read_tokens(token_file) if token_file else []
        return KeyRing(tokens, read_keys(Path(keys_file)) if keys_file else {})

    return Watched([token_file, keys_file], read)


def read_keys(file: Path) -> dict[str, ApiKey]:
    """The keys in a file by id; ConfigError names what is wrong."""
    try:
        return parse_keys(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def parse_keys(text: str, name: str) -> dict[str, ApiKey]:
    """The keys of a TOML text by id; name is what errors call the text."""
    try:
        keys = msgspec.convert(tomllib.loads(text), _File).keys
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name}: {error}") from error
    by_hash: dict[str, str] = {}
    for key_id, key in keys.items():
        where = f"{name} [keys.{key_id}]"
        check_name(key_id, f"{where}: an id")
        if not _SHA256.fullmatch(key.sha256):
            raise ConfigError(f"{where}: sha256 must be 64 digits of 0-9a-f; `headrace keys new`")
        if key.admin == bool(key.tenant):
            raise ConfigError(f"{where}: give either tenant or admin = true")
        if key.tenant:
            check_name(key.tenant, f"{where}: tenant")
        if key.expires is not None and key.expires.tzinfo is None:
            raise ConfigError(f"{where}: expires needs a time zone, as in 2030-01-31T00:00:00Z")
        if (other := by_hash.setdefault(key.sha256, key_id)) != key_id:
            raise ConfigError(f"{where}: is the key of [keys.{other}], too")
    return keys


def check_name(name: str, what: str) -> None:
    """ConfigError unless a key can have this id or tenant, which is part of request ids."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} must be 1 to 64 characters of [A-Za-z0-9._-], is {name!r}")


def make_key() -> str:
    """A new secret."""
    return _PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def section(key_id: str, secret: str, tenant: str, expires: datetime | None) -> str:
    """The section of a file of keys for a secret; without a tenant it is an administrator's."""
    lines = [f"[keys.{_quoted(key_id)}]", f'sha256 = "{_digest(secret).hex()}"']
    lines.append(f'tenant = "{tenant}"' if tenant else "admin = true")
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines) + "\n"


def without_section(text: str, key_id: str) -> str:
    """A file of keys without the sections of a key; comments elsewhere stay."""
    ours = re.compile(rf"\[keys\.{re.escape(_quoted(key_id))}(\.limits)?\]")
    kept, is_ours = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            is_ours = ours.match(line.strip()) is not None
        if not is_ours:
            kept.append(line)
    return "".join(kept)


def _quoted(key_id: str) -> str:
    """A key of TOML; one with a dot is quoted."""
    return f'"{key_id}"' if "." in key_id else key_id


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
