"""The options of `fenka submit`, `serve` and `notebook`: one for each field, and arena's other spellings.

All values stay texts: `jobs/workload.py` converts them as it does those of a file.
"""

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import typer
from typer.core import TyperCommand

from fenka.cli.common_options import Target, modern_option, register
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.service import ServiceSpec
from fenka.jobs.text_fields import merge, read_file
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import RoleSpec

FileOption = Annotated[
    Path | None,
    typer.Option("-f", "--file", metavar="FILE", help="YAML with the same fields; options prevail"),
]
ProgramArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="CMD...", help="one word is a shell's script; several are a program"),
]

_SHORT = {
    "env": "-e",
    "data": "-d",
    "priority": "-p",
    "label": "-l",
    "annotation": "-a",
    "version": "-v",
}
_ARGUMENTS = ("kind", "command")
"""Fields that are no options."""

_OF_ONE_KIND: dict[str, str] = {
    "nproc-per-node": "pytorch",
    "mounts-on-launcher": "mpi",
    "success-policy": "tensorflow",
    "worker-port": "tensorflow",
    "model-name": "tensorflow",
    "model-path": "tensorflow",
    "model-repository": "triton",
    "unix-socket": "custom",
}
"""Options that the help of the other kinds does not show."""

_ALIASES = {
    "--for": "--time-limit",
    "--gpumemory": "--gpu-mem",
    "--gpucore": "--gpu-core",
}

_REFUSED = {
    r"--rdma": "request the device by --device NAME=N",
    r"--gputopology": "the scheduler chooses the cards of a process, leave it out",
    r"--host.*": "pods have namespaces of their own, leave it out",
    r"--model-.*": "there is no registry of models, leave it out",
    r"--role-sequence": "all roles start together and MPI's launcher last, leave it out",
    r"--starting-timeout": "use --time-limit or --running-timeout",
    r"--.*affinity.*": "use --selector and --toleration",
    r"--(?:user|ssh-secret|mount-on-launcher|job-restart-policy)": "leave it out",
}
"""arena's options that are not supported, and what to do instead."""

_REFUSED_OF_SERVICES = {
    r"--enable-istio|--expose-service": "use fenka traffic-split, leave it out",
    r"--model-config-file|--monitoring-config-file": "use --config-file, and name it after --",
    r"--version-policy|--load-models|--allow-metrics": "write the server's own option after --",
    r"--rdma": "request the device by --device NAME=N",
    r"--.*affinity.*": "use --selector and --toleration",
}


class _Field(NamedTuple):
    """A field that is an option: `path` leads to it in the fields of a training."""

    path: tuple[str, ...]
    kind: Any
    meta: msgspec.Meta

    @property
    def option(self) -> str:
        """The option without its dashes. The number of a role's processes is the role's name."""
        return "-".join(self.path).removesuffix("-replicas")

    @property
    def parameter(self) -> str:
        """The name of the function's parameter."""
        return self.option.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether the option has no value. A training has at most one chief and one evaluator."""
        return self.kind is bool or (self.path[1:] == ("replicas",) and self.path[0] != "ps")

    def value(self, given: Any) -> Any:
        """Return the field's value, as a file would have it. Raises UserError."""
        if self.kind is bool:
            return "true" if given else "false"
        if self.is_flag:
            return "1" if given else "0"
        if get_origin(self.kind) is not dict:
            return given
        pairs = [text.partition("=") for text in given]
        for (key, sign, _), text in zip(pairs, given, strict=True):
            if not (key and sign):
                raise UserError(
                    f"invalid --{self.option} {text[:80]!r}: expected {self.meta.title or 'K=V'}",
                    INVALID_INPUT,
                )
        return {key: value for key, _, value in pairs}


def _fields(struct: type[msgspec.Struct], prefix: tuple[str, ...] = ()) -> Iterable[_Field]:
    for field in msgspec.structs.fields(struct):
        path = (*prefix, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, RoleSpec):
            yield from _fields(field.type, path)
        elif path[-1] not in _ARGUMENTS and get_origin(field.type) is Annotated:
            kind, meta = get_args(field.type)
            yield _Field(path, kind, meta)


def options_of(struct: type[msgspec.Struct]) -> tuple[_Field, ...]:
    """Return the options of a struct: its fields that have a help."""
    return tuple(_fields(struct))


TRAINING = tuple(_fields(TrainingSpec))
"""The options of trainings."""
SERVICE = tuple(_fields(ServiceSpec))
"""The options of services."""


def add_options(
    function: Callable[..., None],
    fields: Iterable[_Field],
    kind: str,
    taken: Collection[str] = (),
) -> None:
    """Give a function the options of one kind of training or service; its `**values` get them.

    taken: short names that the function's other options have.
    """
    own = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [_parameter(field, kind, taken) for field in fields]
    function.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]


def register_refused(app: typer.Typer, group: str, name: str, instead: str) -> None:
    """Add a command of arena that is not supported. group: the word before its name."""

    def refuse(
        context: typer.Context, words: Annotated[list[str] | None, typer.Argument()] = None
    ) -> None:
        del words
        raise UserError(f"{group} {context.info_name} is not supported: {instead}", INVALID_INPUT)

    register(app, refuse, "", name=name, hidden=True, passes_arguments=True)


def _parameter(field: _Field, kind: str, taken: Collection[str]) -> inspect.Parameter:
    of_role = len(field.path) > 1
    hidden = _OF_ONE_KIND.get(field.option, "tensorflow" if of_role else kind) != kind
    name, short = f"--{field.option}", _SHORT.get(field.option)
    names = [name, short] if short and short not in taken else [name]
    if field.option in ("gang", "unix-socket"):
        names = [f"{name}/--no-{field.option}"]
    texts: Any = list[str] | None if get_origin(field.kind) in (list, dict) else str | None
    annotation = bool | None if field.is_flag else texts
    title = None if field.is_flag else field.meta.title or _choices(field.kind)
    option = typer.Option(
        names[0],
        *names[1:],
        metavar=title,
        help=_help(field),
        hidden=hidden,
    )
    return inspect.Parameter(
        field.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, option],
    )


def _help(field: _Field) -> str:
    text = field.meta.description or ""
    if len(field.path) == 1:
        return text
    role = field.path[0]
    if field.path[1] == "replicas":
        return "number of parameter servers" if role == "ps" else f"start one {role}"
    return f"{role}: {text}"


def _choices(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if isinstance(kind, types.UnionType) or kind is float:
        return "TIME"
    return "TEXT"


def given_fields(values: Mapping[str, Any], options: Iterable[_Field]) -> dict[str, Any]:
    """Return the fields whose options were given. Raises UserError."""
    fields: dict[str, Any] = {}
    for field in options:
        given = values.get(field.parameter)
        if given is None or given == []:
            continue
        *prefix, name = field.path
        target = fields
        for part in prefix:
            target = target.setdefault(part, {})
        target[name] = field.value(given)
    return fields


def merged_fields(
    struct: type[TrainingSpec | ServiceSpec],
    kind: str,
    file: Path | None,
    values: Mapping[str, Any],
    command: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the fields of the options and the file. Raises UserError, InvalidRequest."""
    given = given_fields(values, TRAINING if struct is TrainingSpec else SERVICE)
    fields = merge(read_file(file, struct), given) if file else given
    if fields.get("kind", kind) != kind:
        noun = "training" if struct is TrainingSpec else "service"
        raise UserError(
            f"{file} describes a {noun} of kind {fields['kind']}, not {kind}", INVALID_INPUT
        )
    return {**fields, "command": command} if command else fields


class SubmitCommand(TyperCommand):
    """Parses options before the command, with arena's spellings.

    Attributes:
        aliases: Other names of options.
        refused: Patterns of arena's options that are not supported, and what to do instead.
    """

    aliases: Mapping[str, str] = _ALIASES
    refused: Mapping[str, str] = _REFUSED

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite arena's spellings; what stands after the first other word is the command's."""
        ctx.allow_interspersed_args = False
        return super().parse_args(ctx, [*self._rewritten(args)])

    def _rewritten(self, words: Sequence[str]) -> Iterable[str]:
        flags = {
            name: getattr(option, "is_flag", False)
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        negative = {name: option.secondary_opts for option in self.params for name in option.opts}
        rest = iter(words)
        for word in rest:
            if not word.startswith("-") or word in ("-", "--"):
                yield word
                break
            name, sign, value = word.partition("=")
            name = modern_option(self.aliases.get(name, name), flags)
            self._refuse(name, value)
            if flags.get(name) and sign:
                if value not in ("true", "false"):
                    raise UserError(
                        f"invalid {name} {value!r}: expected true or false", INVALID_INPUT
                    )
                yield from [name] if value == "true" else negative[name]
            else:
                yield name + sign + value
                if not sign and name in flags and not flags[name] and len(name) > 1:
                    yield from _next(rest)
        yield from rest

    def _refuse(self, name: str, value: str) -> None:
        """Raise UserError for options of arena that are not supported."""
        for pattern, instead in self.refused.items():
            if re.fullmatch(pattern, name):
                raise UserError(f"{name} is not supported: {instead}", INVALID_INPUT)
        if name == "--queue" and value in ("true", "false"):
            raise UserError(
                f"--queue takes the name of a queue of Kueue, got {value}: fenka's own queue needs no option",
                INVALID_INPUT,
            )


class ServeCommand(SubmitCommand):
    """Parses the options of services."""

    aliases = _ALIASES | {"--http-port": "--restful-port", "--grpc-port": "--port"}
    refused = _REFUSED_OF_SERVICES


def _next(words: Iterable[str]) -> Iterable[str]:
    for word in words:
        yield word
        return


DryRunOutput = Literal["yaml", "json"]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="print the objects instead of creating them")
]
DryRunOutputOption = Annotated[
    DryRunOutput, typer.Option("-o", "--output", help="format of --dry-run")
]


def refuse_local(target: Target) -> None:
    """Raise UserError for `--dry-run` on this machine."""
    if target.local:
        raise UserError("--dry-run prints objects of Kubernetes: leave out --local", INVALID_INPUT)


def print_manifests(objects: list[Any], namespace: str, output: DryRunOutput) -> None:
    """Print objects so that `kubectl apply -f -` creates them in a namespace."""
    for manifest in objects:
        manifest["metadata"]["namespace"] = namespace
    if output == "json":
        everything = {"apiVersion": "v1", "kind": "List", "items": objects}
        print(msgspec.json.format(msgspec.json.encode(everything), indent=4).decode())
    else:
        print(_yaml(objects), end="")


def _yaml(objects: list[Any]) -> str:
    """Return documents of YAML in which texts of several lines stay readable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Repeats values that occur twice instead of referring to them."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=1000)
