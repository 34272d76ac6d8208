"""Settings from a TOML file, the environment and flags, all from one frozen struct.

A struct's fields are its TOML keys ([section]), its environment variables
(HEADRACE_<SECTION>_<FIELD>) and its flags (--field-name). Later ones win, in that order.
"""

import difflib
import functools
import os
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
import msgspec

# Sections of all services: services share one file, and each refuses only unknown sections.
SECTIONS = (
    *("router", "streams", "recovery", "tenant", "tenants", "scheduler", "pool", "gpuworker"),
    *("kv_cache", "discovery", "ownership", "serving", "admin", "channel", "process"),
)

T = TypeVar("T", bound=msgspec.Struct)


class ConfigError(click.ClickException):
    """A setting is wrong; the message names the setting and its source."""

    exit_code = 2


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings with the URL of the status store, whose password is in no repr."""

    store_url: Annotated[
        str,
        msgspec.Meta(
            description="Status store: redis://, redis+sentinel://, redis+cluster:// (rediss for"
            " TLS) or unix://; empty keeps no status. With a password, give it in the environment."
        ),
    ] = ""

    def __repr__(self) -> str:
        values = msgspec.structs.asdict(self)
        values["store_url"] = "..." if self.store_url else ""
        return f"{type(self).__name__}({values})"


def help_text(text: str, **bounds: Any) -> Any:
    """Metadata of a field: its text in --help, and its bounds (ge, gt, le, lt)."""
    return msgspec.Meta(description=text, **bounds)


def load(
    struct: type[T],
    *,
    section: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> T:
    """The settings of `section`: defaults, then file, then environment, then overrides.

    Overrides that are None count as not given. Raises ConfigError naming the key.
    """
    values: dict[str, object] = {}
    if file is not None:
        values |= _checked(struct, _section_of_file(file, section), f"{file} [{section}]")
    prefix = f"HEADRACE_{section.upper()}_"
    from_environment = {
        name.removeprefix(prefix).lower(): _split_list(struct, name.removeprefix(prefix), text)
        for name, text in (environ or {}).items()
        if name.startswith(prefix)
    }
    values |= _checked(struct, from_environment, f"environment {prefix}*")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    return _convert(struct, values | _checked(struct, given, "flags"), section)


def is_set(key: str, *, section: str, file: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether the file or the environment sets the key."""
    if f"HEADRACE_{section}_{key}".upper() in environ:
        return True
    return file is not None and key in _section_of_file(file, section)


def _section_of_file(file: Path, section: str) -> dict[str, object]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    for name in document:
        if name not in SECTIONS and name != section:
            near = difflib.get_close_matches(name, SECTIONS, n=1)
            hint = f"did you mean [{near[0]}]?" if near else f"known: {', '.join(SECTIONS)}"
            raise ConfigError(f"{file}: unknown section [{name}]; {hint}")
    values = document.get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: [{section}] must be a table")
    return values


def _checked(struct: type[T], values: Mapping[str, object], source: str) -> dict[str, object]:
    """The values, if each is a field of the right type."""
    known = {field.name for field in msgspec.structs.fields(struct)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{source}: unknown key `{key}`; known: {', '.join(sorted(known))}")
    for key, value in values.items():
        annotation = get_type_hints(struct, include_extras=True)[key]
        try:
            msgspec.convert(value, annotation, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: `{key}`: {error}") from error
    return dict(values)


def _convert(struct: type[T], values: dict[str, object], section: str) -> T:
    try:
        return msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}]: {error}") from error


def _split_list(struct: type[T], name: str, text: str) -> object:
    annotation = get_type_hints(struct).get(name.lower())
    if get_origin(annotation) in {tuple, list}:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def with_settings(
    structs: dict[str, tuple[type[msgspec.Struct], str | None]],
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """A click decorator: adds --config and a flag for each setting; the command gets the settings.

    structs has the struct of each section and the prefix of its flags, None for a section that is
    only in the file. The command is called with a struct for each section.
    """

    def decorate(command: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def loaded(config_file: Path | None, **arguments: object) -> None:
            command(
                {
                    section: _load_section(struct, section, prefix, config_file, arguments)
                    for section, (struct, prefix) in structs.items()
                }
            )

        for struct, prefix in reversed(structs.values()):
            if prefix is not None:
                hints = get_type_hints(struct, include_extras=True)
                for field in reversed(msgspec.structs.fields(struct)):
                    _flag(_prefixed(prefix, field.name), hints[field.name], field)(loaded)
        path = click.Path(path_type=Path)
        return click.option("--config", "config_file", type=path, help="TOML file.")(loaded)

    return decorate


def _load_section(
    struct: type[T],
    section: str,
    prefix: str | None,
    file: Path | None,
    arguments: Mapping[str, object],
) -> T:
    if prefix is None:
        return load(struct, section=section, file=file)
    names = [field.name for field in msgspec.structs.fields(struct)]
    values = {name: arguments[_prefixed(prefix, name)] for name in names}
    # Flags that are not given are None, or () where they are repeatable.
    given = {name: value for name, value in values.items() if value != ()}
    return load(struct, section=section, file=file, environ=os.environ, overrides=given)


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name


def _flag(name: str, annotation: Any, field: msgspec.structs.FieldInfo) -> Any:
    description = ""
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        description = next((e.description for e in extras if isinstance(e, msgspec.Meta)), "") or ""
    flag = "--" + name.replace("_", "-")
    help_line = description + _default(field)
    if annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=help_line)
    if get_origin(annotation) is tuple:
        return click.option(flag, name, multiple=True, help=f"{help_line} (repeatable)")
    return click.option(flag, name, type=_click_type(annotation), default=None, help=help_line)


def _default(field: msgspec.structs.FieldInfo) -> str:
    """The default in --help; the description explains an empty default."""
    if field.default in {msgspec.NODEFAULT, None, "", ()}:
        return ""
    return f"  [default: {field.default}]"


def _click_type(annotation: Any) -> Any:
    if get_origin(annotation) in {Union, types.UnionType}:
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return annotation if annotation in {int, float} else str
