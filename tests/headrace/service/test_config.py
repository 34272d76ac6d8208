"""One struct gives TOML keys, environment variables and flags, and names what is wrong."""

from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner

from headrace.service.config import ConfigError, help_text, load, with_settings


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As a service has them."""

    listen: Annotated[str, help_text("Where to listen.")] = "127.0.0.1:0"
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 16
    policy: Literal["fcfs", "priority"] = "fcfs"
    is_cached: bool = True
    worker: tuple[str, ...] = ()
    limit: int | None = None


def load_settings(tmp_path: Path, text: str = "", environ=None, overrides=None) -> Settings:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return load(Settings, section="demo", file=file, environ=environ, overrides=overrides)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    settings = load_settings(
        tmp_path,
        "[demo]\nmax_num_seqs = 1\nlisten = 'file'\nlimit = 3\n",
        {"HEADRACE_DEMO_MAX_NUM_SEQS": "2", "HEADRACE_DEMO_LISTEN": "env", "OTHER": "x"},
        {"max_num_seqs": 4, "policy": None},
    )
    assert settings == Settings(listen="env", max_num_seqs=4, limit=3)


def test_an_environment_list_is_separated_by_commas(tmp_path: Path) -> None:
    assert load_settings(tmp_path, environ={"HEADRACE_DEMO_WORKER": "a:1, b:2"}).worker == (
        "a:1",
        "b:2",
    )


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("[demo]\nlisen = 'x'\n", {}, "unknown key `lisen`"),
        ("[demo]\nmax_num_seqs = 'many'\n", {}, "`max_num_seqs`"),
        ("[demo]\nmax_num_seqs = 0\n", {}, "`max_num_seqs`"),
        ("demo = 3\n", {}, "must be a table"),
        ("[gpuworkr]\n", {}, "unknown section [gpuworkr]; did you mean [gpuworker]?"),
        ("[router]\n[xyz]\n", {}, "unknown section [xyz]; known: router,"),
        ("[demo\n", {}, "is not TOML"),
        ("", {"HEADRACE_DEMO_POLICY": "lifo"}, "`policy`"),
        ("", {"HEADRACE_DEMO_SPEED": "1"}, "unknown key `speed`"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path, text, environ)
    assert message in caught.value.message


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(Settings, section="demo", file=tmp_path / "none.toml")


def test_flags_come_from_the_struct() -> None:
    seen = {}

    @click.command()
    @with_settings({"demo": (Settings, "peer"), "named": (Settings, None)})
    def command(settings: dict[str, Settings]) -> None:
        """Do nothing."""
        seen.update(settings)

    arguments = ["--peer-max-num-seqs", "3", "--no-peer-is-cached", "--peer-worker", "a"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    given = Settings(max_num_seqs=3, is_cached=False, worker=("a",))
    assert seen == {"demo": given, "named": Settings()}
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "Where to listen." in shown
    assert "[default: 127.0.0.1:0]" in shown.replace("\n", " ").replace("  ", " ")
