"""`headrace keys`: makes API keys, and keeps the file of their hashes that a router reads."""

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from headrace.cli.exits import Failure
from headrace.cli.options import json_option, print_json

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    A router reads the hashes of keys from a file (--api-keys-file) and sees its changes at once.
    Callers send their key as they would a token: --auth-token-file FILE.

    \b
    Examples:
      headrace keys new keys.toml --tenant acme > acme.key
      headrace keys new keys.toml --admin > admin.key
      headrace keys list keys.toml
      headrace keys revoke keys.toml acme-2026-12-01
    """


@keys.command()
@click.argument("file", type=_FILE, required=False)
@click.option("--tenant", default="", help="Whose requests the key makes and sees.")
@click.option("--admin", is_flag=True, help="A key for everything, as a token is.")
@click.option("--id", "key_id", default="", help="Name of the key.  [default: TENANT-DATE]")
@click.option("--expires-in-days", type=click.IntRange(min=1), help="Days that the key counts.")
def new(
    file: Path | None, tenant: str, admin: bool, key_id: str, expires_in_days: int | None
) -> None:
    """Print a new key, once, and add its hash to FILE; without FILE, print the lines for one.

    The key goes to stdout and nothing else does.
    """
    from headrace.service.keys import check_name, make_key, read_keys, section

    if bool(tenant) == admin:
        raise click.UsageError("give either --tenant NAME or --admin")
    check_name(tenant or "admin", "--tenant")
    now = datetime.now(UTC)
    key_id = key_id or f"{tenant or 'admin'}-{now:%Y-%m-%d}"
    check_name(key_id, "--id")
    expires = None if expires_in_days is None else now + timedelta(days=expires_in_days)
    secret = make_key()
    lines = section(key_id, secret, tenant, expires)
    if file is None:
        click.echo(lines, err=True, nl=False)
    else:
        known = read_keys(file) if file.exists() else {}
        if key_id in known:
            raise Failure(f"{file} has a key {key_id!r} already; choose another --id")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        _write(file, f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{lines}")
        click.echo(f"added {key_id} to {file}; the key is shown this once", err=True)
    click.echo(secret)


@keys.command("list")
@click.argument("file", type=_FILE)
@json_option
def list_keys(file: Path, as_json: bool) -> None:
    """The keys in FILE (- is stdin): whose they are, and until when they count."""
    from headrace.service.keys import parse_keys, read_keys

    found = parse_keys(sys.stdin.read(), "stdin") if str(file) == "-" else read_keys(file)
    if as_json:
        print_json([_plain(key_id, key) for key_id, key in found.items()])
        return
    for key_id, key in found.items():
        whose = f"tenant {key.tenant}" if key.tenant else "admin"
        until = "" if key.expires is None else f"  until {key.expires:%Y-%m-%d %H:%M %Z}"
        click.echo(f"{key_id}  {whose}{until}{'  EXPIRED' if key.is_expired() else ''}")


@keys.command()
@click.argument("file", type=_FILE)
@click.argument("key_id")
def revoke(file: Path, key_id: str) -> None:
    """Take a key out of FILE: new calls with the key are refused, open ones go on."""
    from headrace.service.keys import parse_keys, read_keys, without_section

    if key_id not in read_keys(file):
        raise Failure(f"{file} has no key {key_id!r}; `headrace keys list {file}` shows them")
    text = without_section(file.read_text(encoding="utf-8"), key_id)
    if key_id in parse_keys(text, str(file)):
        raise Failure(f"{file}: write the key as a section [keys.{key_id}], or remove it by hand")
    _write(file, text)
    click.echo(f"{key_id} is revoked", err=True)


def _plain(key_id: str, key: Any) -> dict[str, Any]:
    expires = None if key.expires is None else key.expires.isoformat()
    return {
        "id": key_id,
        "tenant": key.tenant,
        "admin": key.admin,
        "expires": expires,
        "is_expired": key.is_expired(),
    }


def _write(file: Path, text: str) -> None:
    """Replaces the file at once, with its mode; a router never reads half of it."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.touch(mode=file.stat().st_mode & 0o777 if file.exists() else 0o600)
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)
