"""The pages of configuration files and exit codes, made of the structs that read the files."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from fenka.autoscaler.inputs import AutoscalerOptions
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.config_file import CONFIGS
from fenka.core import errors
from fenka.gateway.main import GatewayOptions
from fenka.jobs.kubernetes.checks import ClusterDefaults
from fenka.node.config import NodeConfig, RelayConfig
from fenka.scheduler.main import ServerOptions
from fenka.workstation.files import DaemonConfig
from fenka.workstation.main import option_name
from fenka.workstation.users.users_file import BookRules, UserCaps
from tools.reference.markdown import MissingEntry, code, page, sentence, table

HEAD = ("field", "type", "default", "meaning")
PROGRAMS: Mapping[str, tuple[type, str]] = {
    "The workstation's daemon: daemon.toml": (
        DaemonConfig,
        "`/etc/fenka/daemon.toml` is read by root's daemon, `~/.config/fenka/daemon.toml` by every "
        "other one. The keys are the options of `fenka daemon`. "
        "An option of the command line replaces the file's.",
    ),
    "The node program": (
        NodeConfig,
        "Options of `fenka node`. The chart sets them from its values `node.…`.",
    ),
    "The relay of device plugins": (
        RelayConfig,
        "Options of `fenka plugin-relay`. The chart sets them from its values `node.…`.",
    ),
    "The scheduler": (
        ServerOptions,
        "Options of `fenka scheduler`. The chart sets them from `scheduler.…`.",
    ),
    "The gateway": (
        GatewayOptions,
        "Options of `fenka gateway`. `fenka serve` writes them into its pods.",
    ),
    "The autoscaler's program": (
        AutoscalerOptions,
        "Options of `fenka autoscaler run`. The chart sets them from `autoscaler.…`.",
    ),
}


def configuration_page() -> str:
    """Return the page. Raises MissingEntry if a field has no description."""
    parts = []
    for title, (kind, text) in PROGRAMS.items():
        option = "" if kind is DaemonConfig else "--"
        rows = [
            (
                code(option + option_name(field.name)),
                _type(field.type),
                _default(field),
                _described(kind, field),
            )
            for field in msgspec.structs.fields(kind)
        ]
        parts += [f"## {title}", text, table(HEAD, rows)]
    parts += [
        "## The workstation's users: users.toml",
        "`/etc/fenka/users.toml` is read by root's daemon when it starts and at SIGHUP, "
        "`~/.config/fenka/users.toml` by every other one. It begins with `version = 1`. Of each key the most "
        'specific entry counts: `user.NAME`, then the largest of the user\'s `group.NAME`, then `user."*"`. '
        'Each cap may be `"unlimited"`. root and the daemon\'s owner have no caps '
        "([cap users](../do/cap-users.md)).",
        table(HEAD, [*_user_rows(UserCaps, "user.NAME."), *_user_rows(BookRules, "book.")]),
        "## The autoscaler's configuration",
        "A YAML file, which the chart makes from `autoscaler.config`. Durations have a unit: `30s`, `10m`. "
        "`provider.kind` is one of " + ", ".join(map(code, CONFIGS)) + ".",
    ]
    shown = set[type]()
    for provider in (AutoscalerConfig, *CONFIGS.values()):
        for section in _sections(provider):
            fields = _new_fields(section, shown)
            if fields:
                parts += [f"### {_title(section)}", *_section(section, fields)]
            shown.add(section)
    names = ", ".join(code(field.encode_name) for field in msgspec.structs.fields(ClusterDefaults))
    parts += [
        "## Defaults of a cluster's users",
        "The chart's value `users.defaults` has values for options of `fenka submit`, `serve` and `notebook` "
        f"that a user does not give: {names}. They mean what the options mean ([commands](commands.md)).",
        "## MIG layouts",
        "The files are those of NVIDIA's mig-parted, version v1. A layout has `devices` (`all` or indexes), "
        "`mig-enabled` and `mig-devices` (number of instances by profile). "
        "`fenka mig plan` prints such files.",
    ]
    first = "Each field of the files and programs that administrators configure."
    return page("Configuration", first, "the structs that read them", *parts)


def _user_rows(kind: type, prefix: str) -> Iterator[tuple[str, ...]]:
    for field in msgspec.structs.fields(kind):
        name = code(prefix + field.encode_name)
        yield name, _type(field.type), _default(field), _described(kind, field)


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    meanings = {
        "FAILURE": "the command failed. The sentence on standard error says why",
        "INVALID_INPUT": "an option, a file or a request is invalid. The same command fails again",
        "TEMPORARY_FAILURE": "the same command may succeed later (EX_TEMPFAIL)",
        "NOT_EXECUTABLE": "`fenka run`: the program cannot be executed",
        "PROGRAM_NOT_FOUND": "`fenka run`: there is no such program",
        "INTERRUPTED": "ended by Ctrl-C",
    }
    codes = {name: value for name, value in vars(errors).items() if name.isupper()}
    if codes.keys() != meanings.keys():
        raise MissingEntry(
            f"exit codes without a meaning: {sorted(codes.keys() ^ meanings.keys())}"
        )
    rows = [("`0`", sentence("success"))]
    rows += [(code(str(value)), sentence(meanings[name])) for name, value in codes.items()]
    rows.append(
        (
            "other",
            sentence("that of the program which `fenka run`, `wait` or `logs` ran or asked for"),
        )
    )
    first = (
        "The exit codes of fenka's commands. A program that `fenka run` starts keeps its own: "
        "`fenka run` becomes the program."
    )
    return page("Exit codes", first, "src/fenka/core/errors.py", table(("code", "meaning"), rows))


def _described(kind: type, field: msgspec.structs.FieldInfo) -> str:
    for meta in _metas(field.type):
        if meta.description:
            return sentence(meta.description)
    if text := _attributes(kind).get(field.name):
        return sentence(text)
    raise MissingEntry(f"{kind.__name__}.{field.name} has no description")


def _metas(kind: Any) -> Iterator[msgspec.Meta]:
    if meta := [
        item for item in getattr(kind, "__metadata__", ()) if isinstance(item, msgspec.Meta)
    ]:
        yield from meta
    for part in get_args(kind):
        yield from _metas(part)


def _attributes(kind: type) -> dict[str, str]:
    """Return the meanings of a class's fields: of the docstring's section, or below each field."""
    found = dict[str, str]()
    for owner in reversed(kind.__mro__[:-1]):
        if not owner.__module__.startswith("fenka"):
            continue
        section = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")[2]
        for match in re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
            found[match[1]] = " ".join(match[2].split())
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match (field, text):
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    found[name] = " ".join(meaning.split())
    return found


def _sections(kind: Any) -> Iterator[type]:
    """Yield a struct, and those of its fields."""
    yield kind
    for field in msgspec.structs.fields(kind):
        for part in _structs(field.type):
            yield from _sections(part)


def _structs(kind: Any) -> Iterator[type]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in get_args(kind):
        yield from _structs(part)


def _new_fields(kind: type, shown: set[type]) -> list[msgspec.structs.FieldInfo]:
    """Return the fields that no struct of the page has, of a struct that is not on it."""
    if kind in shown:
        return []
    known = {
        field.name
        for base in kind.__mro__
        if base in shown
        for field in msgspec.structs.fields(base)
    }
    return [field for field in msgspec.structs.fields(kind) if field.name not in known]


def _section(kind: type, fields: list[msgspec.structs.FieldInfo]) -> Iterator[str]:
    yield sentence((kind.__doc__ or "").partition("\n\n")[0])
    rows = [
        (code(field.encode_name), _type(field.type), _default(field), _described(kind, field))
        for field in fields
    ]
    yield table(HEAD, rows)


def _title(kind: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Config")).capitalize()


_TYPES = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
}


def _type(kind: Any) -> str:  # noqa: PLR0911
    """Return a type in a reader's words."""
    arguments = get_args(kind)
    if hasattr(kind, "__metadata__"):
        readers = [getattr(getattr(m, "read", None), "__name__", "") for m in kind.__metadata__]
        for word in ("duration", "size"):
            if any(word in reader for reader in readers):
                return word
        return _type(arguments[0])
    origin = get_origin(kind)
    if origin is None:
        name = getattr(kind, "__name__", str(kind))
        return (
            ""
            if name == "NoneType"
            else _TYPES.get(name, _title(kind) if isinstance(kind, type) else name)
        )
    if str(origin).endswith("Literal"):
        return ", ".join(code(str(choice)) for choice in arguments)
    parts = [text for part in arguments if (text := _type(part)) and text != "Ellipsis"]
    if origin in (Union, UnionType):
        return " or ".join(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"map of {parts[-1]}" if parts else "map"
    return f"list of {parts[0]}" if parts else "list"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value: Any = field.default_factory()
        return code(str(value)) if value and isinstance(value, str | int | list) else ""
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = field.default
    if value and _type(field.type) == "duration":
        return code(f"{value}s")
    empty = value in (None, "", (), []) or isinstance(value, msgspec.Struct | msgspec.UnsetType)
    return "" if empty else code(str(value).lower() if isinstance(value, bool) else str(value))
