"""Certificates and API keys of a release, in Secrets that a test made, and how they are renewed."""

import base64
from pathlib import Path

import trustme

from headrace.service import keys
from headrace.service.channels import ChannelConfig
from tests.cluster.api import MERGE, Api, Object

TENANT = "acme"


class Credentials:
    """What the services show and accept, and what our clients do."""

    def __init__(self, api: Api, namespace: str, release: str, folder: Path) -> None:
        """release: beginning of the names of its objects. folder: for our clients' files."""
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        domain = f"{namespace}.svc.cluster.local"
        # As docs/kubernetes.md asks for, and the address of the node port.
        self._names = {
            "router": (
                *(f"{release}-router.{domain}", f"{release}-router-headless.{domain}"),
                "127.0.0.1",
            ),
            "scheduler": (f"*.{release}-scheduler.{domain}",),
            "gpuworker": (f"*.{release}-gpuworker-a.{domain}",),
            "store": (f"{release}-store.{domain}",),
        }
        self._folder = folder
        self._authorities = [trustme.CA()]
        self._secret_keys = [keys.make_key()]

    @property
    def values(self) -> Object:
        """Values of the chart that name the Secrets."""
        secrets = {service: f"cert-{service}" for service in self._names}
        return {
            "auth": {"apiKeys": {"existingSecret": "api-keys"}},
            "tls": {"enabled": True, "existingSecrets": secrets},
        }

    def channel(self, name: str = "used") -> ChannelConfig:
        """How our clients reach the routers: with what they use, or another generation of it."""
        files = (str(self._folder / name / file) for file in ("ca.pem", "key"))
        return ChannelConfig(**dict(zip(("tls_ca_file", "auth_token_file"), files, strict=True)))

    def create(self) -> None:
        """Make the Secrets, and our clients' files."""
        for name, data in self._secrets().items():
            body = {"metadata": {"name": name}, "data": data}
            self._api.create(self._path, body)
        self.use_newest()

    def delete(self) -> None:
        """Delete the Secrets."""
        for name in self._secrets():
            self._api.delete(f"{self._path}/{name}")

    def add_authority_and_key(self) -> ChannelConfig:
        """Accept one more authority and key, which a client may use that is given the result."""
        self._authorities.append(trustme.CA())
        self._secret_keys.append(keys.make_key())
        self._write(self._authorities[-2])
        return self._put("newest")

    def show_newest(self) -> None:
        """Show certificates of the newest authority."""
        self._write(self._authorities[-1])

    def drop_old_keys(self) -> None:
        """Accept the newest key only."""
        del self._secret_keys[:-1]
        self._write(self._authorities[-1])

    def use_newest(self) -> ChannelConfig:
        """Our clients trust the newest authority only, and send the newest key."""
        return self._put("used")

    def copy(self, folder: Path) -> ChannelConfig:
        """What our clients use now, for later."""
        return self._put(str(folder))

    def _put(self, name: str) -> ChannelConfig:
        """The newest authority and key."""
        channel = self.channel(name)
        for file, data in (
            (channel.tls_ca_file, self._authorities[-1].cert_pem.bytes()),
            (channel.auth_token_file, self._secret_keys[-1].encode()),
        ):
            path = Path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.new")
            draft.write_bytes(data)
            draft.replace(path)
        return channel

    def _write(self, authority: trustme.CA) -> None:
        for name, data in self._secrets(authority).items():
            self._api.patch(f"{self._path}/{name}", {"data": data}, MERGE)

    def _secrets(self, authority: trustme.CA | None = None) -> dict[str, dict[str, str]]:
        """The data of each Secret by name."""
        shown = authority or self._authorities[0]
        trusted = b"".join(each.cert_pem.bytes() for each in self._authorities)
        found = {}
        for service, names in self._names.items():
            pair = shown.issue_cert(*names)
            found[f"cert-{service}"] = {
                "ca.crt": _encoded(trusted),
                "tls.crt": _encoded(pair.cert_chain_pems[0].bytes()),
                "tls.key": _encoded(pair.private_key_pem.bytes()),
            }
        sections = (
            keys.section(f"k{i}", secret, TENANT, None)
            for i, secret in enumerate(self._secret_keys)
        )
        found["api-keys"] = {"keys.toml": _encoded("\n".join(sections).encode())}
        return found


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
