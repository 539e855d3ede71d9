"""The commands and their options. Each imports what it needs when it runs, so that --help is fast."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    name="fenka",
    help="Share GPUs: cut cards into slices of memory, hand them out, enforce them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
top = typer.Typer(help="Show what is used.", no_args_is_help=True)
app.add_typer(top, name="top")
sim = typer.Typer(help="Operate simulated cards.", no_args_is_help=True)
app.add_typer(sim, name="sim")


class Output(StrEnum):
    """Formats of what prints a table."""

    table = "table"
    json = "json"
    yaml = "yaml"


class Layout(StrEnum):
    """Of `fenka top node`."""

    fenka = "fenka"
    arena = "arena"


class Mode(StrEnum):
    """Kinds of nodes, by arena's letters and words."""

    n = "n"
    none = "none"
    e = "e"
    exclusive = "exclusive"
    t = "t"
    topology = "topology"
    s = "s"
    share = "share"


class Isolation(StrEnum):
    """How a slice is enforced."""

    namespace = "namespace"
    cooperative = "cooperative"


class CoreMode(StrEnum):
    """What a share of compute means."""

    hard = "hard"
    soft = "soft"
    weight = "weight"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="table, json or yaml")]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--gpu-mem", metavar="SIZE", help="GPU memory per card: 4 (units of the daemon), 4096MiB"
    ),
]
CoreOption = Annotated[
    int,
    typer.Option("--gpu-core", metavar="PERCENT", min=0, max=100, help="share of each card's time"),
]
CoreModeOption = Annotated[
    Optional[CoreMode],  # noqa: UP045
    typer.Option("--gpu-core-mode", help="hard (the default): no more than that; soft, weight"),
]
CardsOption = Annotated[int, typer.Option("--cards", help="slices on so many different cards")]
WholeOption = Annotated[int, typer.Option("--gpus", help="whole cards instead of slices")]
ModelOption = Annotated[
    Optional[list[str]],  # noqa: UP045 typer reads it at run time
    typer.Option("--model", help="only cards of this model (may be repeated)"),
]
NameOption = Annotated[str, typer.Option("--name", help="how ps, logs and stop call it")]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="fail if nothing is free now")]
TimeoutOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--timeout", min=0, metavar="SECONDS", help="wait no longer than this"),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="run in the background; see fenka logs")
]
GangOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--gang", metavar="N", help="N processes with such a slice each, all or none"),
]
PriorityOption = Annotated[
    int, typer.Option("--priority", metavar="N", help="the larger is served first")
]
TimeLimitOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--time-limit", metavar="SECONDS", help="end it then; it may start earlier for that"
    ),
]
IsolationOption = Annotated[
    Isolation,
    typer.Option("--isolation", help="cooperative: by environment alone, a program can undo it"),
]
UserNamespacesOption = Annotated[
    bool,
    typer.Option(
        "--allow-user-namespaces",
        help="for bubblewrap, apptainer, browsers; with them a program can undo its limits",
    ),
]


LocalOption = Annotated[
    bool, typer.Option("--local", help="this machine, whatever cluster there is")
]
ClusterOption = Annotated[bool, typer.Option("--cluster", help="the kubeconfig's cluster")]
KubeconfigOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--kubeconfig", metavar="FILE", help="else $KUBECONFIG, else ~/.kube/config"),
]
ContextOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--context", metavar="NAME", help="of the kubeconfig"),
]


@app.callback(invoke_without_command=True)
def fenka(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Share GPUs: cut cards into slices of memory, hand them out, enforce them."""
    if version:
        from fenka import __version__

        typer.echo(f"fenka {__version__}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="the program and its arguments")
    ],
    gpu_mem: MemoryOption = "",
    gpu_core: CoreOption = 0,
    gpu_core_mode: CoreModeOption = None,
    cards: CardsOption = 1,
    gpus: WholeOption = 0,
    model: ModelOption = None,
    name: NameOption = "",
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    detach: DetachOption = False,
    isolation: IsolationOption = Isolation.namespace,
    user_namespaces: UserNamespacesOption = False,
    gang: GangOption = None,
    priority: PriorityOption = 0,
    time_limit: TimeLimitOption = None,
) -> None:
    """Run a program with a slice of a GPU, waiting for its turn."""
    from fenka.cli import launching

    wanted = launching.Wanted(
        gpu_mem,
        gpu_core,
        gpu_core_mode.value if gpu_core_mode else None,
        cards,
        gpus,
        tuple(model or ()),
        name,
        gang,
        priority,
        time_limit,
    )
    how = launching.How(not no_wait, timeout, detach, isolation.value, user_namespaces)
    launching.run(wanted, how, command)


@app.command()
def notebook(
    gpu_mem: MemoryOption = "",
    gpu_core: CoreOption = 0,
    gpu_core_mode: CoreModeOption = None,
    cards: CardsOption = 1,
    gpus: WholeOption = 0,
    model: ModelOption = None,
    name: NameOption = "",
    password: Annotated[
        str, typer.Option("--password", envvar="PASSWORD", help="asked for at login")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--directory", help="what the notebook shows")
    ] = Path(),
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    detach: DetachOption = False,
    isolation: IsolationOption = Isolation.namespace,
    user_namespaces: UserNamespacesOption = False,
) -> None:
    """Start a Jupyter server with a slice of a GPU and print its URL."""
    from fenka.cli import launching

    wanted = launching.Wanted(
        gpu_mem,
        gpu_core,
        gpu_core_mode.value if gpu_core_mode else None,
        cards,
        gpus,
        tuple(model or ()),
        name,
    )
    how = launching.How(not no_wait, timeout, detach, isolation.value, user_namespaces)
    launching.notebook(wanted, how, password, directory)


@app.command()
def ps(
    output: OutputOption = Output.table,
) -> None:
    """List leases and who waits."""
    from fenka.cli import listing

    listing.ps(output.value)


@app.command()
def queue(
    local: LocalOption = False,
    cluster: ClusterOption = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show who waits, in order, for which cards, and why."""
    from fenka.cli import queue as screens
    from fenka.cli.cluster import Target

    screens.queue(Target(local, cluster, kubeconfig, context), output.value)


@app.command()
def logs(
    name: Annotated[str, typer.Argument()],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until it ends")] = False,
) -> None:
    """Show what a detached program printed."""
    from fenka.cli import listing

    listing.logs(name, follow=follow)


@app.command()
def stop(
    names: Annotated[list[str], typer.Argument(metavar="NAME")],
    grace: Annotated[float, typer.Option(min=0, help="seconds between SIGTERM and SIGKILL")] = 10.0,
) -> None:
    """End programs and give back their slices; also those that wait."""
    from fenka.cli import listing

    listing.stop(names, grace)


@app.command()
def resize(
    name: Annotated[str, typer.Argument(help="a job or a pod that runs, or NAMESPACE/NAME")],
    gpu_mem: MemoryOption = "",
    gpu_core: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--gpu-core", metavar="PERCENT", min=0, max=100, help="0 = no limit"),
    ] = None,
    gpu_core_mode: CoreModeOption = None,
    container: Annotated[
        str, typer.Option("-c", "--container", help="of a pod that has several with a slice")
    ] = "",
    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="of the pod; else the context's")
    ] = "",
    local: LocalOption = False,
    cluster: ClusterOption = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Change what a running program may have of its cards; it need not be started again."""
    from fenka.cli import resizing
    from fenka.cli.cluster import Target

    target = Target(local, cluster or bool(container or namespace), kubeconfig, context)
    wanted = resizing.Wanted(
        gpu_mem, gpu_core, gpu_core_mode.value if gpu_core_mode else None, container
    )
    resizing.resize(target, name, namespace, wanted)


@top.command("node")
def top_node(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[NODE]...", help="only these nodes"),
    ] = None,
    share: Annotated[bool, typer.Option("-s", "--share", help="memory of shared cards")] = False,
    details: Annotated[bool, typer.Option("-d", "--details", help="one line a program")] = False,
    layout: Annotated[
        Layout, typer.Option("--layout", help="arena: as arena 0.7 and later print it")
    ] = Layout.fenka,
    mode: Annotated[
        Optional[Mode],  # noqa: UP045
        typer.Option("-m", "--mode", help="with --layout arena: nodes of one kind"),
    ] = None,
    local: LocalOption = False,
    cluster: ClusterOption = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show the cards and what is allocated on them: this machine's, else the cluster's."""
    from fenka.cli import top as screens
    from fenka.cli.cluster import Target, ViewOptions

    target = Target(local, cluster, kubeconfig, context)
    view = ViewOptions(
        share=share,
        details=details,
        arena=layout is Layout.arena,
        mode=mode.value if mode else "",
        names=tuple(names or ()),
        output=output.value,
    )
    screens.node(target, view)


@app.command()
def inspect(
    node: Annotated[str, typer.Argument(metavar="[NODE]", help="only this node")] = "",
    details: Annotated[bool, typer.Option("-d", "--details", help="one line a pod")] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show how a cluster's GPU memory is shared, as `kubectl inspect gpushare` does."""
    from fenka.cli import inspect as screens
    from fenka.cli.cluster import Target

    target = Target(cluster=True, kubeconfig=kubeconfig, context=context)
    screens.inspect(target, node or None, details=details, output=output.value)


@app.command()
def why(
    pod: Annotated[str, typer.Argument(metavar="POD", help="its name, or NAMESPACE/NAME")],
    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="of the pod; else the context's")
    ] = "",
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Say why a pod is pending, node by node, and what would help."""
    from fenka.cli import why as answers
    from fenka.cli.cluster import Target

    target = Target(cluster=True, kubeconfig=kubeconfig, context=context)
    answers.why(target, pod, namespace, output=output.value)


@app.command()
def doctor(
    output: OutputOption = Output.table,
) -> None:
    """Say what is found here, what is enforced, what is wrong."""
    from fenka.cli import doctor as checks

    checks.doctor(output.value)


@app.command()
def daemon(
    simulate: Annotated[
        str, typer.Option(metavar="SPEC", help="simulated cards: T4, 'V100-16G*2', FILE.toml")
    ] = "",
    policy: Annotated[
        str, typer.Option(help="which card comes first: binpack or spread")
    ] = "binpack",
    unit: Annotated[str, typer.Option(help="what --gpu-mem 4 counts: GiB or MiB")] = "GiB",
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="CARD", help="lease only this card, by index or UUID (repeatable)"),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="run in the background")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end the running daemon")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="with --stop: programs keep running")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
    background_child: Annotated[bool, typer.Option("--background-child", hidden=True)] = False,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True)] = False,
) -> None:
    """Lease this machine's cards (starts by itself)."""
    from fenka.cli import serving

    if stop:
        serving.stop(force=force)
    else:
        given = serving.Given(simulate, policy, unit, tuple(only or ()))
        if background:
            serving.start(given)
        else:
            serving.daemon(
                given, resume=resume, background_child=background_child, lifeline=lifeline
            )


@app.command()
def scheduler(
    policy: Annotated[
        str, typer.Option(help="which node and card come first: binpack or spread")
    ] = "binpack",
    address: Annotated[str, typer.Option(help="to listen on")] = "0.0.0.0",
    port: Annotated[int, typer.Option(envvar="PORT", help="to listen on")] = 12345,
    kubeconfig: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="else the pod's service account, $KUBECONFIG or ~/.kube/config"),
    ] = None,
    namespace: Annotated[
        str, typer.Option(envvar="POD_NAMESPACE", help="of the replicas' lease")
    ] = "kube-system",
    lease: Annotated[
        str, typer.Option(help="by which replicas agree on a leader")
    ] = "fenka-scheduler",
    name: Annotated[
        str, typer.Option(envvar="POD_NAME", help="of this replica, else the host's name")
    ] = "",
    advertise: Annotated[
        str, typer.Option(envvar="POD_IP", help="the IP at which other replicas reach this one")
    ] = "",
    hami: Annotated[
        bool, typer.Option("--hami-names", help="understand nvidia.com/gpumem and gpucores too")
    ] = False,
    queue_penalty: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="of a card that each pod counts which its namespace holds or has asked for before; "
            "0: pods are served by time alone",
        ),
    ] = 60,
    queue_max_penalty: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="after which a namespace's first pod goes first, whatever its namespace has had",
        ),
    ] = 3600,
    half_life: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="after which half of what a namespace had counts"),
    ] = 3600,
    scheduler_name: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME", help="bind only pods of this schedulerName (repeatable)"),
    ] = None,
    tls: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="DIRECTORY",
            help="serve HTTPS with these certificates, to callers that have one of the same authority",
        ),
    ] = None,
    read_port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="PORT", help="serve what changes nothing over HTTP to everybody"),
    ] = None,
    inspect: Annotated[
        bool, typer.Option(help="let those without a certificate read who holds what")
    ] = True,
    metrics: Annotated[
        bool, typer.Option(help="let those without a certificate read the metrics")
    ] = True,
    largest_body: Annotated[
        int, typer.Option(metavar="MIB", help="of a request that is answered")
    ] = 8,
    bodies: Annotated[
        int, typer.Option(metavar="MIB", help="of all requests that are answered at a time")
    ] = 64,
) -> None:
    """Serve kube-scheduler as its extender (runs in a cluster)."""
    from fenka.cli import serving_cluster
    from fenka.scheduler.main import ServerOptions

    serving_cluster.scheduler(
        ServerOptions(address, port, read_port, kubeconfig),
        policy,
        (namespace, lease),
        name,
        advertise,
        hami=hami,
        fairness=(queue_penalty, queue_max_penalty, half_life),
        schedulers=tuple(scheduler_name or ()),
        given=serving_cluster.Given(tls, inspect, metrics, largest_body, bodies),
    )


@app.command()
def certificates(
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIRECTORY", help="write what kube-scheduler needs"),
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="make those that are missing or end soon")
    ] = False,
    host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME", help="with --make: another name or address of the extender"),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", envvar="POD_NAMESPACE", help="of the extender")
    ] = "fenka-system",
    name: Annotated[str, typer.Option(help="of the extender's Service")] = "fenka-scheduler",
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show, write or make the certificates by which kube-scheduler and the extender know each other."""
    from fenka.cli import certificates as command
    from fenka.cli.cluster import Target

    target = Target(cluster=True, kubeconfig=kubeconfig, context=context)
    installation = command.Installation(target, namespace, name)
    if make:
        command.make(installation, host or ())
    if into is not None:
        command.write(installation, into)
    if not make and into is None:
        command.show(installation, output.value)


@sim.command("card")
def simulate_card(
    card: Annotated[str, typer.Argument(help="by index or UUID")],
    temperature: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--temperature", metavar="C", help="what the card says, whatever it does"),
    ] = None,
    no_temperature: Annotated[
        bool, typer.Option("--no-temperature", help="back to what its load gives")
    ] = False,
    xid: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--xid", metavar="N", help="report this error of the driver"),
    ] = None,
    ecc_errors: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--ecc-errors", metavar="N", help="count uncorrected memory errors"),
    ] = None,
    corrected: Annotated[
        bool, typer.Option("--corrected", help="with --ecc-errors: errors that ECC has corrected")
    ] = False,
    lose: Annotated[bool, typer.Option("--lose", help="the card falls off the bus")] = False,
    recover: Annotated[bool, typer.Option("--recover", help="a lost card comes back")] = False,
) -> None:
    """Provoke faults and readings of a simulated card."""
    from fenka.cli import simulating

    simulating.simulate_card(
        card,
        simulating.Wish(temperature, no_temperature, xid, ecc_errors, corrected, lose, recover),
    )


@app.command()
def node(
    name: Annotated[
        str, typer.Option("--name", envvar="NODE_NAME", help="this node's name in the cluster")
    ],
    unit: Annotated[
        str, typer.Option(help="what aliyun.com/gpu-mem: 4 counts: GiB, MiB, 256MiB …")
    ] = "GiB",
    simulated: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIRECTORY", help="simulated cards, kept by fenka sim node"),
    ] = None,
    host_root: Annotated[
        Path, typer.Option(help="where this process sees the node's own root")
    ] = Path("/"),
    kubeconfig: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="instead of the pod's service account"),
    ] = None,
    exclusive: Annotated[
        bool, typer.Option(help="serve nvidia.com/gpu while the node is not shared")
    ] = True,
    labelled_only: Annotated[
        bool, typer.Option("--labelled-only", help="but not while it has neither label")
    ] = False,
    hami: Annotated[
        bool, typer.Option("--hami-names", help="understand nvidia.com/gpumem and gpucores too")
    ] = False,
    assume_cdi: Annotated[
        bool, typer.Option("--assume-cdi", help="containerd 1.7 has enable_cdi set")
    ] = False,
    over_limit: Annotated[
        str, typer.Option(help="a pod that gets round its limit: report or evict")
    ] = "report",
    unmanaged_process: Annotated[
        str, typer.Option(help="a leased pod's program without fenka's library: kill or report")
    ] = "kill",
    metrics_port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="PORT", help="serve /metrics, /healthz and /readyz"),
    ] = None,
) -> None:
    """Serve this node's cards to its kubelet (runs in a DaemonSet)."""
    from fenka.cli import nodes
    from fenka.node.main import Config

    nodes.node(
        Config(
            node=name,
            unit=unit,
            simulated=simulated,
            host=host_root,
            kubeconfig=kubeconfig,
            exclusive=exclusive,
            labelled_only=labelled_only,
            hami=hami,
            assume_cdi=assume_cdi,
            over_limit=over_limit,
            unmanaged_process=unmanaged_process,
            metrics_port=metrics_port,
        )
    )


@sim.command("node")
def simulate_node(
    spec: Annotated[str, typer.Argument(help="T4, 'V100-16G*2', FILE.toml")],
    directory: Annotated[Path, typer.Option(help="where programs find the cards")] = Path(
        "/run/fenka/simulated"
    ),
    name: Annotated[
        str,
        typer.Option("--name", envvar="NODE_NAME", help="makes the cards' UUIDs; default: host"),
    ] = "",
) -> None:
    """Keep a node's simulated cards until told to stop."""
    from fenka.cli import nodes

    nodes.simulate(spec, directory, name)


@app.command()
def demo(
    check: Annotated[bool, typer.Option("--check", help="end after the checks")] = False,
) -> None:
    """Watch three notebooks share one card, a fourth waiting."""
    from fenka.cli import demo as scenario

    scenario.demo(check=check)


def main() -> None:
    """Run a command; anything foreseen ends in one sentence and an exit code."""
    from fenka.cli.errors import report_errors

    with report_errors():
        app()
    sys.exit(0)
