"""`headrace keys`: keys that are shown once, and the file of their hashes."""

import hashlib
import json

import pytest
from click.testing import CliRunner

from headrace.cli.app import main
from headrace.service.keys import read_keys


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["keys", *map(str, arguments)], input=stdin)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.toml"


def test_a_new_key_is_shown_once_and_its_hash_is_kept(file):
    made = run("new", file, "--tenant", "acme", "--id", "a.1", "--expires-in-days", 30)
    key = made.stdout.strip()
    assert made.exit_code == 0
    assert key not in file.read_text() + made.stderr
    kept = read_keys(file)["a.1"]
    assert (kept.tenant, kept.sha256) == ("acme", hashlib.sha256(key.encode()).hexdigest())
    assert not kept.is_expired()
    assert file.stat().st_mode & 0o077 == 0


def test_without_a_file_the_lines_for_one_are_shown(file):
    made = run("new", "--admin", "--id", "root")
    file.write_text(made.stderr)
    assert read_keys(file)["root"].admin
    assert made.stdout.startswith("headrace_")


def test_keys_are_listed_and_revoked_and_comments_stay(file):
    file.write_text("# ours\n")
    for tenant in ("acme", "globex"):
        run("new", file, "--tenant", tenant, "--id", f"{tenant}.1")
    with file.open("a") as more:
        more.write('[keys."globex.1".limits]\nmax_live_requests = 2\n')
    assert run("list", file).stdout == "acme.1  tenant acme\nglobex.1  tenant globex\n"
    assert run("revoke", file, "globex.1").exit_code == 0
    listing = run("list", "-", "--json", stdin=file.read_text())
    assert listing.exit_code == 0, listing.output
    listed = json.loads(listing.stdout)
    assert [key["id"] for key in listed] == ["acme.1"]
    assert file.read_text().startswith("# ours\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tenant", "a", "--admin"], "either --tenant NAME or --admin"),
        ([], "either --tenant NAME or --admin"),
        (["--tenant", "a/b"], "tenant must be 1 to 64 characters"),
        (["--tenant", "b", "--id", "x y"], "--id must be 1 to 64 characters"),
        (["--tenant", "b", "--id", "known"], "has a key 'known' already"),
    ],
)
def test_a_key_that_no_router_would_take_is_not_made(file, arguments, error):
    run("new", file, "--tenant", "a", "--id", "known")
    before = file.read_text()
    refused = run("new", file, *arguments)
    assert refused.exit_code != 0
    assert error in refused.stderr
    assert not refused.stdout
    assert file.read_text() == before


def test_revoking_a_key_that_is_not_there_says_so(file):
    run("new", file, "--tenant", "a")
    refused = run("revoke", file, "b")
    assert refused.exit_code == 1
    assert "has no key 'b'" in refused.stderr
