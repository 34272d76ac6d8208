"""What README and docs say of the code is true of it: files, names, settings, reasons, commands."""

import re
import tomllib
from pathlib import Path

import pytest

from docs import generate
from headrace.cli.app import main
from headrace.service.config import SECTIONS, load
from router.config import RouterConfig, TenantsConfig
from router.core.admission import Reason
from scheduler.config import SchedulerSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs").glob("*.md")}
PAGES = "\n".join([README, *DOCS.values()])
# [text](target), of links that stay in the repository.
LINKS = [
    (page, target)
    for page, text in {"README.md": README, **{f"docs/{n}": t for n, t in DOCS.items()}}.items()
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text)
]
SERVICES = ("headrace", "router", "scheduler", "gpuworker")

# `file.py` `Name.method`, perhaps with a line's end between them.
NAMED = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", PAGES)
PATHS = re.findall(
    r"`((?:headrace|router|scheduler|gpuworker|tests|benchmarks|docs)/[\w./]*)`", PAGES
)
REASON = re.compile(
    r"\b(?:not_found|already_exists|unavailable|exhausted|deadline_exceeded|unimplemented|aborted"
    r"|internal|unauthenticated)\(\s*\"([A-Z_]+)\""
)


def test_the_settings_page_is_what_the_services_read():
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page(), "run `make docs`"
    page = generate.METRICS_PAGE.read_text(encoding="utf-8")
    assert page == generate.metrics_page(), "run `make docs`"


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_a_path_in_the_pages_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "target"), sorted(set(LINKS)))
def test_a_link_leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_readme_is_short_and_leads_to_every_page():
    assert len(README.splitlines()) <= 150
    assert {name for name in DOCS if f"](docs/{name})" not in README} == set()


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_name_in_the_pages_is_in_its_file(file, name):
    text = (ROOT / file).read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"^\s*(?:class|(?:async )?def) {part}\b", text, re.MULTILINE), part


def test_the_page_of_the_scheduling_core_names_all_its_files():
    page = (ROOT / "docs" / "scheduling-core.md").read_text(encoding="utf-8")
    files = {file.name for file in (ROOT / "scheduler" / "core").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if f"`{name}`" not in page} == set()


def test_the_life_of_a_request_names_the_code():
    assert len(NAMED) > 25


def test_the_example_file_is_on_the_page_of_operations_and_loads():
    file = ROOT / "docs" / "example.toml"
    assert f"```toml\n{file.read_text(encoding='utf-8')}```" in DOCS["operations.md"]
    assert set(tomllib.loads(file.read_text(encoding="utf-8"))) <= set(SECTIONS)
    assert load(RouterConfig, section="router", file=file).max_queued_requests == 1000
    assert load(SchedulerSettings, section="scheduler", file=file).watermark == 0.01


def test_services_may_have_every_section_in_one_file(tmp_path):
    file = tmp_path / "all.toml"
    file.write_text("".join(f"[{section}]\n" for section in SECTIONS))
    for struct, programs in generate._SECTIONS.values():
        assert programs
        section = next(name for name, entry in generate._SECTIONS.items() if entry[0] is struct)
        assert load(struct, section=section, file=file) == struct()
    file.write_text("[tenants.named.gold]\nweight = 3.0\n")
    named = load(TenantsConfig, section="tenants", file=file).named
    assert named["gold"].weight == 3


def test_every_section_of_the_settings_is_on_the_page_of_operations():
    for section in SECTIONS:
        assert f"| `[{section}]` |" in DOCS["operations.md"]


def test_every_reason_of_an_error_is_on_the_page_of_the_api():
    files = [file for service in SERVICES for file in (ROOT / service).rglob("*.py")]
    reasons = {r for file in files for r in REASON.findall(file.read_text(encoding="utf-8"))}
    assert len(reasons) > 10
    # These are INVALID_FIELD on the wire.
    fields = {"PROMPT_TOO_LONG", "MAX_TOKENS_TOO_LARGE", "MIN_TOKENS_TOO_LARGE"}
    reasons |= {r.value for r in Reason} - fields
    assert sorted(reason for reason in reasons if f"`{reason}`" not in DOCS["api.md"]) == []


def test_every_command_in_the_pages_exists():
    commands = set(re.findall(r"^\$ (?:\w+=\S+ |.*\| )*headrace (\w+)", PAGES, re.MULTILINE))
    assert len(commands) > 5
    assert commands <= set(main.list_commands(None))


def test_every_make_target_in_the_pages_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^(?:\$ |\| `)make ([a-z-]+)", PAGES, re.MULTILINE)):
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), target
