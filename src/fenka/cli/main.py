"""The commands of `fenka`: a table of names and modules. A module is imported when its command runs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from fenka.cli.startup import no_collection

if TYPE_CHECKING:
    from typer import Typer

ARGUMENTS = "COMMAND [OPTIONS] [ARGS]..."
SUMMARY = "Share GPUs: cut cards into slices of memory, hand them out, enforce them."
ADMIN_SUMMARY = "Operate machines and clusters: daemon, autoscaler, MIG, sim."


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: a function of a module of fenka.cli, or a group of commands.

    Attributes:
        name: The word after `fenka`, or after `fenka admin`.
        function: `MODULE:NAME` of the function or of the group's `typer.Typer`. Without NAME it is the word.
        summary: One sentence for `fenka --help` and for the command's own help.
        aliases: Other words for it, as arena's users type them.
        passes_arguments: All words after the command's own options belong to another program.
    """

    name: str
    function: str
    summary: str
    aliases: tuple[str, ...] = ()
    passes_arguments: bool = False


Groups = Mapping[str, tuple[Command, ...]]

COMMANDS: Groups = {
    "Use": (
        Command("run", "run", "Run a program with a slice of a GPU.", passes_arguments=True),
        Command("notebook", "notebook_command", "Start a Jupyter server with a slice of a GPU."),
        Command("submit", "submit:app", "Submit a distributed training."),
        Command("serve", "serve:app", "Serve models, and manage the services."),
        Command("logs", "control", "Show the output of a workload.", ("log",)),
        Command("stop", "control", "End programs, and release their slices."),
        Command("resize", "control", "Change the slice of a running job or pod."),
        Command("delete", "control", "Delete workloads.", ("del",)),
    ),
    "Look": (
        Command("ps", "screens.ps", "List your jobs, trainings, notebooks and services."),
        Command("get", "workloads.show", "Show a workload and its instances."),
        Command("queue", "queue_command", "List pending requests in the order of their service."),
        Command("top", "screens.top:app", "Show how much of the cards nodes and jobs have."),
        Command(
            "dashboard", "admin.dashboard_command", "Show cards, queue and programs in the browser."
        ),
        Command(
            "usage", "workloads.usage", "Show who held, used and paid for how much of the cards."
        ),
        Command("why", "why", "Explain why a pod or job is pending, and what would help."),
    ),
    "Operate": (
        Command("doctor", "admin.doctor", "Check drivers, cards, limits and the daemon."),
        Command("admin", "", ADMIN_SUMMARY),
    ),
}
"""The rows of `fenka --help`."""

MORE = (
    Command("start", "notebook_command", "Start a notebook again that was stopped or was idle."),
    Command("attach", "control", "Run a command in an instance of a workload."),
    Command("wait", "control", "Wait until a job has ended or a service is ready."),
    Command("prune", "control", "Delete training jobs that ended some time ago."),
    Command("list", "workloads.show:list_jobs", "List training jobs.", ("ls",)),
    Command("traffic-split", "control", "Divide a service's requests among its versions."),
    Command("inspect", "compat.inspect_gpushare", "Show what `kubectl inspect gpushare` shows."),
    Command("quota", "quota", "Show what you hold, and what you may hold at most."),
    Command("demo", "demo", "Watch three notebooks share one card; a fourth waits."),
)
"""Commands that `fenka --help` shows by name only."""

ADMIN: Groups = {
    "Workstation": (
        Command(
            "daemon", "admin.daemon_command", "Lease this machine's cards. Other commands start it."
        ),
        Command(
            "containers", "containers.switch", "Let containers have slices, whatever the engine."
        ),
        Command(
            "docker",
            "containers.engines",
            "Start a container of Docker with a slice.",
            passes_arguments=True,
        ),
        Command(
            "podman",
            "containers.engines",
            "Start a container of Podman with a slice.",
            passes_arguments=True,
        ),
        Command(
            "compose",
            "containers.compose",
            "Start the services of a Compose file, and pay for their slices.",
            passes_arguments=True,
        ),
        Command("prioritize", "control", "Change the priority of a pending or running job."),
        Command("book", "quota:book", "Keep cards for a time: book, list and cancel."),
        Command("completion", "completion", "Print the completion of bash, zsh or fish."),
        Command("proxy", "admin.proxy:app", "Install and check libraries in front of the driver."),
    ),
    "Cluster": (
        Command("autoscaler", "admin.autoscaler:app", "Plan and operate elastic GPU nodes."),
        Command("nodes", "admin.elastic", "List nodes, and elastic ones on their way."),
        Command("groups", "admin.elastic", "Show groups of elastic nodes: prices, stock, limits."),
        Command("certificates", "admin.certificate_secrets", "Manage the extender's certificates."),
        Command("mig", "admin.mig:app", "Plan layouts of cards divided into MIG instances."),
        Command("bundle", "admin.bundle:app", "Pack an installation without the Internet."),
        Command("uninstall", "admin.uninstall", "Remove what fenka leaves in a cluster."),
    ),
    "Simulate": (
        Command("sim", "admin.sim:app", "Operate simulated cards and nodes."),
        Command(
            "simulate", "admin.simulate", "Replay a trace, or try nodes and policies on paper."
        ),
        Command(
            "snapshot", "admin.pending_trial", "Print a cluster without names, for `simulate`."
        ),
    ),
    "Programs of the chart": (
        Command("scheduler", "admin.programs", "Serve kube-scheduler as its extender."),
        Command("node", "admin.programs", "Serve this node's cards to its kubelet."),
        Command(
            "plugin-relay",
            "admin.programs:plugin_relay",
            "Stay registered with the kubelet while `fenka node` restarts.",
        ),
        Command("gateway", "admin.programs", "Pass a service's requests on to its replicas."),
    ),
}
"""The rows of `fenka admin --help`. The words work without `admin` too, as scripts and units have them."""

USERS_ROWS = (*(row for rows in COMMANDS.values() for row in rows), *MORE)
ADMIN_ROWS = tuple(row for rows in ADMIN.values() for row in rows)


def run(arguments: Sequence[str]) -> None:
    """Run one command. Raises SystemExit, FenkaError and OSError."""
    words, prefix, rows, show_help = [*arguments], "fenka", (*USERS_ROWS, *ADMIN_ROWS), help_text
    if words[:1] == ["admin"]:
        words, prefix, rows, show_help = words[1:], "fenka admin", ADMIN_ROWS, admin_help_text
    name = words[0] if words else "--help"
    if name == "help":
        # As `git help commit` and `kubectl help get`.
        return run([*prefix.split()[1:], *words[1:], "--help"])
    if name in ("-h", "--help"):
        print(show_help())
        sys.exit(0 if words else 2)
    if name in ("--version", "version"):
        from fenka import __version__

        print(f"fenka {__version__}")
        return
    commands = {word: row for row in rows for word in (row.name, *row.aliases)}
    if name not in commands:
        from fenka.cli.usage_errors import unknown

        is_option = name.startswith("-")
        known = ("--help", "--version") if is_option else commands
        kind = "option" if is_option else "command"
        raise unknown(kind, name, known, f"`{prefix} --help` lists all")
    command = commands[name]
    with no_collection():
        app = _load(command)
    from fenka.cli.usage_errors import one_sentence

    full_name = f"{prefix} {command.name}"
    with one_sentence(full_name):
        # Alone it would print the parser's own sentences, and end the process by itself.
        code = app(words[1:], prog_name=full_name, standalone_mode=False)
    if isinstance(code, int) and code:
        sys.exit(code)


def help_text() -> str:
    """Return the help of `fenka` itself: the commands by purpose."""
    return "\n".join(
        [
            f"Usage: fenka {ARGUMENTS}",
            f"  {SUMMARY}",
            *_listed(COMMANDS),
            f"More: {', '.join(row.name for row in MORE)}",
            "Options: --version, -h, --help. For your shell: fenka completion bash|zsh|fish",
        ]
    )


def admin_help_text() -> str:
    """Return the help of `fenka admin`."""
    usage = f"Usage: fenka admin {ARGUMENTS}"
    return "\n".join([usage, f"  {ADMIN_SUMMARY}", *_listed(ADMIN), "Options: -h, --help"])


def _listed(groups: Groups) -> list[str]:
    """Return a title for each group, and a line for each command."""
    width = max(len(row.name) for rows in groups.values() for row in rows)
    lines = list[str]()
    for title, rows in groups.items():
        lines += [f"{title}:", *(f"  {row.name:<{width}}  {row.summary}" for row in rows)]
    return lines


def _load(command: Command) -> "Typer":
    from typer import Typer

    from fenka.cli.common_options import register, single

    module, _, name = command.function.partition(":")
    function = getattr(import_module(f"fenka.cli.{module}"), name or command.name.replace("-", "_"))
    if isinstance(function, Typer):
        return function
    # Programs of the chart declare their options in their own modules.
    function = function() if module == "admin.programs" else function
    app = single()
    register(app, function, command.summary, passes_arguments=command.passes_arguments)
    return app


def main() -> None:
    """Run the command line. An expected failure ends in one sentence and its exit code."""
    from fenka.cli.error_report import report_errors

    with report_errors():
        run(sys.argv[1:])
    sys.exit(0)
