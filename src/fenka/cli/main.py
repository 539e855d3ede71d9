"""The commands of `fenka`: a table of names and modules. A module is imported when its command runs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from fenka.cli.startup import no_collection

if TYPE_CHECKING:
    from typer import Typer

USAGE = "fenka COMMAND [OPTIONS] [ARGS]..."
SUMMARY = "Share GPUs: cut cards into slices of memory, hand them out, enforce them."


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: a function of a module of fenka.cli, or a group of commands.

    Attributes:
        name: The word after `fenka`.
        function: `MODULE:NAME` of the function or of the group's `typer.Typer`.
        summary: One sentence for `fenka --help` and for the command's own help.
        passes_arguments: All words after the command's own options belong to another program.
        aliases: Other words for it, as arena's users type them.
    """

    name: str
    function: str
    summary: str
    passes_arguments: bool = False
    aliases: tuple[str, ...] = ()


COMMANDS: dict[str, tuple[Command, ...]] = {
    "Use": (
        Command("run", "run:run", "Run a program with a slice of a GPU.", passes_arguments=True),
        Command("notebook", "notebook:notebook", "Start a Jupyter server with a slice of a GPU."),
        Command("start", "notebook:start", "Start a notebook again that was stopped or was idle."),
        Command("submit", "submit:app", "Submit a distributed training."),
        Command("serve", "serve:app", "Serve models, and manage the services."),
        Command(
            "traffic-split",
            "workloads.service_look:traffic_split",
            "Divide a service's requests among its versions.",
        ),
        Command(
            "logs",
            "control:logs",
            "Show the output of a job, or of a program in the background.",
            aliases=("log",),
        ),
        Command("attach", "control:attach", "Run a command in an instance of a training job."),
        Command(
            "stop", "control:stop", "End running or waiting programs and release their slices."
        ),
        Command("wait", "control:wait", "Wait until a program has ended, and exit with its code."),
        Command("resize", "control:resize", "Change the slice of a running job or pod."),
        Command("delete", "control:delete", "Delete training jobs.", aliases=("del",)),
        Command("prune", "control:prune", "Delete training jobs that ended some time ago."),
    ),
    "Look": (
        Command("list", "workloads.look:list_jobs", "List training jobs.", aliases=("ls",)),
        Command("get", "workloads.look:get", "Show a training job and its instances."),
        Command("ps", "jobs:ps", "List this machine's jobs, running and waiting."),
        Command("queue", "queue:queue", "List pending requests in the order of their service."),
        Command("top", "top:app", "Show how much of the cards nodes and jobs have."),
        Command(
            "groups", "admin.elastic:groups", "Show groups of elastic nodes: prices, stock, limits."
        ),
        Command(
            "nodes", "admin.elastic:nodes", "Show elastic nodes, and those that are on their way."
        ),
        Command(
            "inspect", "compat.gpushare:inspect", "Show what `kubectl inspect gpushare` shows."
        ),
        Command("why", "why:why", "Explain why a pod or job is pending, and what would help."),
        Command("doctor", "admin.doctor:doctor", "Check drivers, cards, limits and the daemon."),
    ),
    "Operate": (
        Command(
            "daemon", "admin.daemon:daemon", "Lease this machine's cards. Other commands start it."
        ),
        Command("autoscaler", "admin.autoscaler:app", "Plan and operate elastic GPU nodes."),
        Command(
            "certificates", "admin.certificates:certificates", "Manage the extender's certificates."
        ),
        Command(
            "uninstall",
            "admin.uninstall:uninstall",
            "Remove what fenka leaves in a cluster after helm uninstall.",
        ),
        Command(
            "mig", "admin.mig:app", "Plan layouts of cards that are divided into MIG instances."
        ),
        Command("proxy", "admin.proxy:app", "Install and check libraries in front of the driver."),
    ),
    "Simulate": (
        Command("sim", "admin.sim:app", "Operate simulated cards and nodes."),
        Command(
            "simulate", "admin.autoscaler:simulate", "Say which pods would start on further nodes."
        ),
        Command("demo", "demo:demo", "Watch three notebooks share one card; a fourth waits."),
    ),
}

PROGRAMS = (
    Command("scheduler", "admin.scheduler:scheduler", "Serve kube-scheduler as its extender."),
    Command("node", "admin.node:node", "Serve this node's cards to its kubelet."),
    Command("gateway", "admin.gateway:gateway", "Pass a service's requests on to its replicas."),
    Command(
        "metrics-adapter",
        "admin.metrics_adapter:metrics_adapter",
        "Serve figures of services to autoscalers.",
    ),
)
"""Programs that people do not start themselves; not shown in the help."""


def run(arguments: Sequence[str]) -> None:
    """Run one command. Raises SystemExit, FenkaError and OSError."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(help_text())
        sys.exit(0 if arguments else 2)
    if name == "--version":
        from fenka import __version__

        print(f"fenka {__version__}")
        return
    rows = [row for group in (*COMMANDS.values(), PROGRAMS) for row in group]
    commands = {word: row for row in rows for word in (row.name, *row.aliases)}
    if name not in commands:
        similar = get_close_matches(name, commands)
        hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
        kind = "option" if name.startswith("-") else "command"
        sys.stderr.write(
            f"Usage: {USAGE}\nTry 'fenka --help' for help.\n\nError: No such {kind} {name!r}.{hint}\n"
        )
        sys.exit(2)
    command = commands[name]
    with no_collection():
        app = _load(command)
    app(arguments[1:], prog_name=f"fenka {command.name}")


def help_text() -> str:
    """Return the help of `fenka` itself: the commands by purpose."""
    width = max(len(row.name) for group in COMMANDS.values() for row in group)
    lines = [f"Usage: {USAGE}", "", f"  {SUMMARY}"]
    for title, group in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {row.name:<{width}}  {row.summary}" for row in group)]
    options = ["", "Options:", "  --version   print the version", "  -h, --help  show this help"]
    return "\n".join([*lines, *options])


def _load(command: Command) -> "Typer":
    from typer import Typer

    from fenka.cli.options import register, single

    module, _, name = command.function.partition(":")
    function = getattr(import_module(f"fenka.cli.{module}"), name)
    if isinstance(function, Typer):
        return function
    app = single()
    register(app, function, command.summary, passes_arguments=command.passes_arguments)
    return app


def main() -> None:
    """Run the command line. An expected failure ends in one sentence and its exit code."""
    from fenka.cli.errors import report_errors

    with report_errors():
        run(sys.argv[1:])
    sys.exit(0)
