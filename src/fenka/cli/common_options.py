"""Options that several commands share, and how functions become commands.

A command is a function whose parameters are annotated with options. A parameter whose type is a dataclass
or a msgspec.Struct stands for all options among the fields of that type.
"""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from fenka.cli.error_report import UserError
from fenka.cli.usage_errors import unknown
from fenka.core.errors import INVALID_INPUT
from fenka.core.request import ComputeMode
from fenka.formats import durations, quantities

Output = Literal["table", "json", "yaml"]


def seconds(text: str | float) -> float:
    """Return the seconds of an option: `90`, `0.5`, `1m30s`. Raises typer.BadParameter."""
    # typer gives a default value to it, too.
    text = str(text)
    number = durations.parse_duration(text)
    if number is None and _SECONDS.fullmatch(text):
        number = float(text)
    if number is None:
        raise typer.BadParameter(f"{shown(text)} is no time: write seconds, or as 90s, 5m or 2h")
    return number


def percent(text: str | int) -> int:
    """Return the percent of an option: `50` or `50%`. Raises typer.BadParameter."""
    number = durations.parse_percent(str(text))
    if number is None:
        raise typer.BadParameter(f"{shown(str(text))} is no percentage: write 0 to 100")
    return number


def whole_cards(text: str | int) -> int:
    """Return a number of cards. Raises typer.BadParameter, which says how to ask for a part of one."""
    if not _WHOLE.fullmatch(str(text)):
        raise typer.BadParameter(quantities.no_whole_cards(str(text)))
    return int(text)


def shown(text: str) -> str:
    """Return a value as it was typed, cut to one line."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}")
_WHOLE = re.compile(r"[0-9]{1,9}")

OutputOption = Annotated[Output, typer.Option("-o", "--output", help="format of the output")]
WideOutputOption = Annotated[
    Literal["table", "wide", "json", "yaml"],
    typer.Option("-o", "--output", help="format of the output; wide is table, as in arena"),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--gpu-mem", metavar="SIZE", help="GPU memory per card: 4 (units, GiB by default), 4096MiB"
    ),
]
CoreOption = Annotated[
    int | None,
    typer.Option(
        "--gpu-core",
        parser=percent,
        metavar="PERCENT",
        help="share of each card's time; 0: what others leave",
    ),
]
CoreModeOption = Annotated[
    ComputeMode | None,
    typer.Option(
        "--gpu-core-mode", help="hard: never more; soft: more if idle; weight: relative share"
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("-n", "--namespace", help="namespace; default: the context's")
]
KubeconfigOption = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, then ~/.kube/config"),
]
ContextOption = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="context of the kubeconfig")
]
DetailsOption = Annotated[bool, typer.Option("-d", "--details", help="one line per pod or program")]


@dataclass(frozen=True, slots=True)
class Target:
    """The world of a command: this machine's daemon or a cluster. Raises UserError for contradictions.

    FENKA_WORLD selects one of them, cluster or machine, where no option does.
    """

    local: Annotated[
        bool, typer.Option("--local", help="this machine, even if a cluster exists")
    ] = False
    cluster: Annotated[bool, typer.Option("--cluster", help="the kubeconfig's cluster")] = False
    kubeconfig: KubeconfigOption = None
    context: ContextOption = None

    def __post_init__(self) -> None:
        if self.local and self.of_cluster:
            raise UserError(
                "--local selects this machine, but another option selects a cluster: remove one of them",
                INVALID_INPUT,
            )
        world = os.environ.get("FENKA_WORLD", "")
        if world not in ("", "cluster", "machine"):
            raise UserError(f"FENKA_WORLD is cluster or machine, not {world}", INVALID_INPUT)
        if world and not self.local and not self.of_cluster:
            object.__setattr__(self, "cluster" if world == "cluster" else "local", True)

    @property
    def of_cluster(self) -> bool:
        """Whether the options select a cluster."""
        return self.cluster or self.kubeconfig is not None or self.context is not None


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """The cluster that a command is about."""

    kubeconfig: KubeconfigOption = None
    context: ContextOption = None

    @property
    def target(self) -> Target:
        """The same as a Target."""
        return Target(cluster=True, kubeconfig=self.kubeconfig, context=self.context)


def cluster_configured() -> bool:
    """Return whether this machine has a kubeconfig, or this is a pod."""
    named = os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
    files = (Path(path).expanduser() for path in named if path)
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(file.is_file() for file in files)


_CAMEL_CASE = re.compile(r"--[a-z]+(?:[A-Z][a-z]*)+")
_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_PASS_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def single(cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Return an application for one command."""
    return typer.Typer(
        cls=cls,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=_CONTEXT,
    )


def group(summary: str, aliases: Mapping[str, str] = MappingProxyType({})) -> typer.Typer:
    """Return an application for commands that share their first word. aliases: names by other names."""

    class Group(TyperGroup):
        """Finds a command by all of its names. Its dozens of options are made only once."""

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return super().get_command(ctx, aliases.get(cmd_name, cmd_name))

    app = single(Group)
    # A callback makes it a group even if it has only one command.
    app.callback(help=summary, no_args_is_help=True)(lambda: None)
    return app


def register_bare(app: typer.Typer, function: Callable[..., None], summary: str) -> None:
    """Let a function run when the group's own options are not followed by a command.

    Args:
        app: The application.
        function: Its parameters are the options.
        summary: The group's help.
    """
    expanded = _expanded(function)
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(expanded)
    def callback(ctx: typer.Context, **values: Any) -> None:
        if ctx.invoked_subcommand is None:
            expanded(**values)

    parameters = [context, *inspect.signature(expanded).parameters.values()]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.callback(help=summary, invoke_without_command=True, no_args_is_help=True)(callback)


def register(
    app: typer.Typer,
    function: Callable[..., None],
    summary: str,
    *,
    name: str | None = None,
    passes_arguments: bool = False,
    hidden: bool = False,
    given: Mapping[str, Any] | None = None,
    cls: type[TyperCommand] | None = None,
) -> None:
    """Add a function as a command.

    Args:
        app: The application.
        function: Its parameters are the options.
        summary: The command's help.
        name: The command's name, if it is not the function's.
        passes_arguments: Words after the command's own options belong to another program.
        hidden: Leave the command out of the help.
        given: Values of parameters that are no options of this command.
        cls: Parses the words, if they need more than typer's own class does.
    """
    settings = _CONTEXT | (_PASS_ARGUMENTS if passes_arguments else {})
    cls = cls or (_PassingCommand if passes_arguments else _Command)
    app.command(name, cls=cls, help=summary, hidden=hidden, context_settings=settings)(
        _expanded(function, given or {})
    )


ONLY_OF_CLUSTER = "ONLY_OF_CLUSTER"
"""A class of options has this attribute if they mean nothing on a machine."""


class _Command(TyperCommand):
    """Parses options in arena's old spelling too. The help of a machine has no options of clusters."""

    _words: tuple[str, ...] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters: list[Any] = list(self.params)
        left_out = [
            option
            for option in parameters
            if getattr(option, "rich_help_panel", None) == ONLY_OF_CLUSTER and not option.hidden
        ]
        if self._cluster_is_meant():
            left_out = []
        for option in left_out:
            option.hidden = True
        super().format_options(ctx, formatter)
        for option in left_out:
            option.hidden = False
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(
                f"Those of a cluster are {len(left_out)} more: `{ctx.command_path} --cluster --help`."
            )

    def _cluster_is_meant(self) -> bool:
        names = {word.partition("=")[0] for word in self._words}
        chosen = bool(names & {"--cluster", "--kubeconfig", "--context"})
        return chosen or os.environ.get("FENKA_WORLD") == "cluster" or cluster_configured()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._words = tuple(args)
        known = {name for option in self.params for name in option.opts}
        words = args[: args.index("--")] if "--" in args else args
        for number, word in enumerate(words):
            name, equals, value = word.partition("=")
            args[number] = modern_option(name, known) + equals + value
        return super().parse_args(ctx, args)


class _PassingCommand(TyperCommand):
    """Passes words on to another program, but not a misspelt option of its own as that program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = next((ctx.params[param.name] for param in self.params if param.nargs == -1), ())
        if (
            words
            and not self.hidden  # a hidden command refuses all words itself
            and words[0].startswith("-")
            and given[: 1 + given.index(words[0])].count("--") == 0
        ):
            name = words[0].partition("=")[0]
            known = [option for param in self.params for option in param.opts]
            raise unknown("option", name, known, "a program follows the options after --")
        return rest


def modern_option(name: str, known: Collection[str]) -> str:
    """Return today's spelling of an option: for `--syncMode`, `--sync-mode` and arena's notice."""
    if name in known or not _CAMEL_CASE.fullmatch(name):
        return name
    modern = re.sub(r"[A-Z]", lambda letter: f"-{letter[0].lower()}", name)
    if modern in known:
        typer.echo(f"Flag {name} has been deprecated, please use {modern} instead", err=True)
    return modern


def _fields(kind: object) -> list[inspect.Parameter]:
    """Return the options among a type's fields; none if it is no dataclass or Struct."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [*map(_struct_option, msgspec.structs.fields(kind))]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [*inspect.signature(kind).parameters.values()]
    return []


def _struct_option(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    """Return the option for a field with a msgspec.Meta.

    Its title is the metavar, its description the help, `ge` the minimum; `extra` may have an `envvar`. A
    field that is False by default has no option that negates it.
    """
    kind, meta = get_args(field.type)
    default = (
        field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    )
    if field.required:
        default = inspect.Parameter.empty
    option = typer.Option(
        *([f"--{field.name.replace('_', '-')}"] if default is False else ()),
        metavar=meta.title,
        help=meta.description,
        min=meta.ge,
        envvar=(meta.extra or {}).get("envvar"),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _expanded(
    function: Callable[..., None], given: Mapping[str, Any] = MappingProxyType({})
) -> Callable[..., None]:
    """Return the function with the fields of such types as its parameters, less those that are given."""
    parameters: list[inspect.Parameter] = []
    fields: dict[str, tuple[Callable[..., object], list[str]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        if options := _fields(parameter.annotation):
            if getattr(parameter.annotation, ONLY_OF_CLUSTER, False):
                for option in options:
                    get_args(option.annotation)[1].rich_help_panel = ONLY_OF_CLUSTER
            fields[parameter.name] = parameter.annotation, [option.name for option in options]
        parameters += options or [parameter]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        values |= given
        for name, (make, names) in fields.items():
            values[name] = make(**{field: values.pop(field) for field in names})
        function(**values)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
        if parameter.name not in given
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


_SIZES = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_YEAR = 365 * 86400


def short_duration(seconds: float) -> str:
    """Return a duration in its largest unit, cut, as kubectl and arena do: 59s, 10m, 12h, 20d, 1y."""
    whole = max(int(seconds), 0)
    if whole >= _YEAR:
        return f"{whole // _YEAR}y"
    unit = next((unit for unit, size in _SIZES.items() if whole >= size), "s")
    return f"{whole // _SIZES[unit]}{unit}"


def parse_duration(option: str, text: str) -> int:
    """Return the seconds of `10h`, `1h30m` or `7d`. Raises UserError, naming the option."""
    seconds = durations.parse_duration(text)
    if seconds is None or seconds % 1:
        raise UserError(
            f"invalid {option} {text!r}: expected a duration such as 30m, 10h or 7d", INVALID_INPUT
        )
    return int(seconds)
