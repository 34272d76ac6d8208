"""Reads certificates, keys and tokens from files and checks them before gRPC gets them.

gRPC reports a bad file on stderr at most, then as a failed bind or an unreachable peer, or ends the
process.
"""

import ssl
from pathlib import Path

from headrace.service.config import ConfigError


def read_tokens(file: str) -> list[str]:
    """The tokens in `file`, one a line: servers accept each, clients send the first.

    Raises ConfigError if there is none.
    """
    lines = _read(file).decode("utf-8", errors="replace").splitlines()
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise ConfigError(f"{file} holds no token")
    if not all(token.isascii() and token.isprintable() for token in tokens):
        raise ConfigError(f"{file}: tokens must be lines of printable ASCII")
    return tokens


def read_authorities(file: str) -> bytes:
    """The PEM certificates in `file`, or ConfigError."""
    data = _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise ConfigError(f"{file} holds no PEM certificate ({error})") from error
    return data


def read_pair(cert_file: str, key_file: str) -> tuple[bytes, bytes]:
    """A PEM certificate and its private key; ConfigError for any other content."""
    cert, key = (_read(file) if file else None for file in (cert_file, key_file))
    if cert is None or key is None:
        raise ConfigError("tls_cert_file and tls_key_file go together")
    try:
        # With a password given, OpenSSL does not ask for one on the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{cert_file} and {key_file} are not a PEM certificate and its private key, "
            f"without a password ({error})"
        ) from error
    return cert, key


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
