"""`fenka daemon`."""

import contextlib
import json
import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from fenka.build import build_id
from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.workstation import files, main, options_file, paths, service_manager
from fenka.workstation.client import (
    EXIT_ALREADY_RUNNING,
    READY,
    WAITING,
    Connection,
    daemon_environment,
    open_log,
    start_daemon,
)
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import AlreadyRunning, Config
from fenka.workstation.paths import Runtime
from fenka.workstation.replacement import restart_daemon, stop_daemon
from fenka.workstation.shutdown import ShutdownSignals


def daemon(
    context: typer.Context,
    config: Config,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="run in the background")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end the running daemon")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="with --stop: even if programs run; they go on")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="replace the running daemon by this build's; programs go on"
        ),
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="print the options, and where they come from")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
    replace: Annotated[bool, typer.Option("--replace", hidden=True)] = False,
    background_child: Annotated[bool, typer.Option("--background-child", hidden=True)] = False,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True)] = False,
    no_file: Annotated[bool, typer.Option("--no-file", hidden=True)] = False,
) -> None:
    """Start, run or end the daemon.

    Args:
        context: The command line, for the options that it names.
        config: What to lease.
        background: Return once the daemon answers.
        stop: End the daemon that runs.
        force: End it even if programs hold slices.
        restart: Replace the daemon that runs.
        show_config: Print the options.
        resume: Use the configuration of the previous daemon, if it left one.
        replace: Wait for the end of the daemon that runs.
        background_child: start_daemon started this; stdout and stderr are its pipe until clients can connect.
        lifeline: End when standard input reaches its end.
        no_file: Do not read the file of options.
    """
    if sum((background, stop, restart, show_config)) > 1:
        raise UserError(
            "--background, --stop, --restart and --show-config exclude each other", INVALID_INPUT
        )
    given = {
        name: getattr(config, name)
        for name in config.__struct_fields__
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    if stop:
        stop_daemon(paths.current(), force=force)
        print("the fenka daemon has ended")
    elif show_config:
        _show(paths.current(), given)
    elif restart:
        _restart(given)
    elif background:
        _start(given)
    else:
        runtime = paths.own()
        recorded = files.load_config(runtime) if resume else None
        config = recorded or _resolve(runtime, given, no_file=no_file)
        _serve(runtime, config, replace, background_child, lifeline)


def _resolve(runtime: Runtime, given: dict[str, Any], *, no_file: bool = False) -> Config:
    """Return the options of the command line, else the file's, else the defaults. Raises InvalidOption."""
    return Config(**({} if no_file else options_file.load(runtime)) | given)


def _start(given: dict[str, Any]) -> None:
    runtime = paths.own()
    if runtime.answers():
        raise UserError("a fenka daemon already runs here: `fenka doctor` describes it")
    start_daemon(runtime, [*_words(_resolve(runtime, given)), "--no-file"])
    print("the fenka daemon is running; `fenka daemon --stop` ends it")


def _restart(given: dict[str, Any]) -> None:
    """Replace the daemon, with its options unless the command line has others."""
    runtime = paths.own()
    recorded = files.load_config(runtime)
    config = msgspec.structs.replace(recorded, **given) if recorded else _resolve(runtime, given)
    restart_daemon(runtime, [*_words(config), "--no-file"])
    with Connection(runtime) as connection:
        pid = connection.daemon_pid
    print(f"the fenka daemon is now process {pid}, build {build_id()}; programs went on")


def _show(runtime: Runtime, given: dict[str, Any]) -> None:
    """Print the options as a file has them, with their origin in comments."""
    from_file = options_file.load(runtime)
    config = Config(**from_file | given)
    print(f"# the daemon's options; {runtime.options} may have them")
    for name, value in msgspec.structs.asdict(config).items():
        origin = (
            "the command line"
            if name in given
            else str(runtime.options)
            if name in from_file
            else "default"
        )
        print(f"{name} = {json.dumps(value, ensure_ascii=False)}  # {origin}")
    running = files.load_config(runtime) if runtime.answers() else None
    for name, value in msgspec.structs.asdict(running).items() if running else ():
        if value != getattr(config, name):
            print(f"# the running daemon has {name} = {json.dumps(value, ensure_ascii=False)}")


def _words(config: Config) -> list[str]:
    """Return a configuration as words of a command line."""
    words: list[str] = []
    for name, value in msgspec.structs.asdict(config).items():
        for word in filter(None, value if isinstance(value, list) else [value]):
            words += [f"--{name}", word]
    return words


def _serve(
    runtime: Runtime, config: Config, replace: bool, background_child: bool, lifeline: bool
) -> None:
    ending = ShutdownSignals(0 if lifeline else None)
    # Now, when a reason to end can still be reported.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = open_log(str(runtime.log), flags) if background_child else None
    parent, waiting = os.getppid(), False

    def ready(daemon: Daemon) -> None:
        if log is not None:
            _redirect_to_log(log)
        with contextlib.suppress(OSError):  # The disk is full: that is no reason to end.
            _announce(daemon)
        service_manager.notify("READY=1")

    def keep_waiting() -> bool:
        nonlocal waiting
        if replace and not waiting:
            waiting = True
            os.write(1, WAITING)
        return replace and not ending.signals and os.getppid() == parent

    try:
        ended = main.run(runtime, config, ready, ending, keep_waiting)
    except AlreadyRunning as why:
        raise UserError(str(why), EXIT_ALREADY_RUNNING if background_child else 1) from None
    except Exception:
        # Ctrl-C may have ended a program that the start needs.
        if signal.SIGINT in ending.signals:
            raise KeyboardInterrupt from None
        raise
    if ended.moved is not None and not ending.signals:
        environment = {
            **daemon_environment(runtime),
            **service_manager.environment(),
            **ended.moved,
        }
        _serve_again(environment, background_child, lifeline)
    if ended.jobs:
        print(f"fenka daemon: ended; {', '.join(ended.jobs)} go on, and the next daemon knows them")
    if signal.SIGINT in ending.signals:
        raise KeyboardInterrupt


def _serve_again(environment: dict[str, str], background_child: bool, lifeline: bool) -> NoReturn:
    """Become the next daemon, in the same process, as its service manager and its user know it."""
    flags = [
        flag
        for flag, is_set in (("--background-child", background_child), ("--lifeline", lifeline))
        if is_set
    ]
    words = [sys.executable, "-Pm", "fenka", "daemon", "--resume", *flags]
    os.chdir("/")
    os.execve(sys.executable, words, environment)


def _redirect_to_log(log: int) -> None:
    """Tell who started us, and talk to the log from now on. Raises BrokenPipeError."""
    os.write(1, READY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _announce(daemon: Daemon) -> None:
    cards = ", ".join(
        f"{card.model} {card.memory_mib}MiB"
        for card in daemon.broker.node.cards
        if card.parent is None
    )
    kind = "simulated cards" if daemon.hardware.driver.simulated else "cards"
    print(f"fenka daemon: leasing {kind} {cards} at {daemon.runtime.socket}", flush=True)
