"""Files that are not what they should be: a clear error, before gRPC sees them."""

from pathlib import Path

import pytest
import trustme

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.config import ConfigError
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.service.tls import read_tokens


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by what they hold: two pairs, and one that is no PEM."""
    folder = tmp_path_factory.mktemp("pki")
    names = ("cert", "key", "other_key", "garbage")
    files = {name: folder / name for name in names}
    authority = trustme.CA()
    leaf, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    files["cert"].write_bytes(leaf.cert_chain_pems[0].bytes())
    files["key"].write_bytes(leaf.private_key_pem.bytes())
    files["other_key"].write_bytes(other.private_key_pem.bytes())
    files["garbage"].write_text("garbage\n")
    return {name: str(file) for name, file in files.items()}


@pytest.mark.parametrize(
    ("cert", "key"), [("garbage", "key"), ("cert", "garbage"), ("cert", "other_key")]
)
async def test_a_pair_that_is_none_is_not_taken_for_a_taken_port(pem, cert, key) -> None:
    server = GrpcServer(ServingConfig(tls_cert_file=pem[cert], tls_key_file=pem[key]), [])
    with pytest.raises(ConfigError, match="are not a PEM certificate and its private key"):
        await server.start()
    await server.stop(0)


async def test_authorities_that_are_none_are_named(pem) -> None:
    with pytest.raises(ConfigError, match="garbage holds no PEM certificate"):
        open_channel("127.0.0.1:1", ChannelConfig(tls_ca_file=pem["garbage"]))


async def test_a_certificate_to_show_without_its_key_does_not_end_the_process(pem) -> None:
    with pytest.raises(ConfigError, match="go together"):
        open_channel("127.0.0.1:1", ChannelConfig(tls_cert_file=pem["cert"]))


@pytest.mark.parametrize(
    "token", ["t\N{LATIN SMALL LETTER O WITH DIAERESIS}ken", "one\nt\two", " "]
)
def test_a_token_that_no_header_can_carry_is_refused(tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match="token"):
        read_tokens(str(file))
