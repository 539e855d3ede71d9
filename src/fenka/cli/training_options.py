"""The options of `fenka submit`: one for each field of a training, and arena's other spellings.

All values stay texts: `jobs/training_fields.py` converts them as it does those of a file.
"""

import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import typer
from typer.core import TyperCommand

from fenka.cli.errors import UserError
from fenka.cli.options import modern_option
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.training import RoleSpec, TrainingKind, TrainingSpec

_SHORT = {"env": "-e", "data": "-d", "priority": "-p", "label": "-l", "annotation": "-a"}
_ARGUMENTS = ("kind", "command")
"""Fields that are no options."""

_OF_ONE_KIND: dict[str, TrainingKind] = {
    "nproc-per-node": "pytorch",
    "mounts-on-launcher": "mpi",
    "success-policy": "tensorflow",
    "worker-port": "tensorflow",
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
        elif path[-1] not in _ARGUMENTS:
            kind, meta = get_args(field.type)
            yield _Field(path, kind, meta)


FIELDS = tuple(_fields(TrainingSpec))


def parameters(kind: TrainingKind) -> list[inspect.Parameter]:
    """Return the options of one kind of training as parameters of a function."""
    return [_parameter(field, kind) for field in FIELDS]


def _parameter(field: _Field, kind: TrainingKind) -> inspect.Parameter:
    of_role = len(field.path) > 1
    hidden = _OF_ONE_KIND.get(field.option, "tensorflow" if of_role else kind) != kind
    name = f"--{field.option}"
    names = [name, *filter(None, [_SHORT.get(field.option)])]
    if field.option == "gang":
        names = ["--gang/--no-gang"]
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


def given_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose options were given. Raises UserError."""
    fields: dict[str, Any] = {}
    for field in FIELDS:
        given = values.get(field.parameter)
        if given is None or given == []:
            continue
        *prefix, name = field.path
        target = fields
        for part in prefix:
            target = target.setdefault(part, {})
        target[name] = field.value(given)
    return fields


class SubmitCommand(TyperCommand):
    """Parses options before the command, with arena's spellings."""

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
            name = modern_option(_ALIASES.get(name, name), flags)
            _refuse(name, value)
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


def _next(words: Iterable[str]) -> Iterable[str]:
    for word in words:
        yield word
        return


def _refuse(name: str, value: str) -> None:
    """Raise UserError for options of arena that are not supported."""
    for pattern, instead in _REFUSED.items():
        if re.fullmatch(pattern, name):
            raise UserError(f"{name} is not supported: {instead}", INVALID_INPUT)
    if name == "--queue" and value in ("true", "false"):
        raise UserError(
            f"--queue takes the name of a queue of Kueue, got {value}: fenka's own queue needs no option",
            INVALID_INPUT,
        )
