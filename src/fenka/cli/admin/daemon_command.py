"""`fenka daemon`: runs the daemon, ends one of any version, or replaces it under running programs."""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from fenka import procfs
from fenka.build import build_id
from fenka.cli.error_report import UserError, print_error
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.hardware.nvml import NoDriver
from fenka.hardware.peer_credentials import peer
from fenka.isolation.lease_files import describe_os_error
from fenka.workstation import client, failing_start, files, lifetime, main, paths, protocol
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import AlreadyRunning, DaemonConfig
from fenka.workstation.lifetime import ShutdownSignals
from fenka.workstation.paths import Runtime, UnsafeDirectory

END_TIMEOUT_S = 10.0

EXIT_NO_DRIVER = 69
"""EX_UNAVAILABLE of sysexits.h: the exit code of a service on a machine without a driver."""


class NotReplaced(FenkaError):
    """The daemon could not be ended or replaced."""


def stop_daemon(runtime: Runtime, *, force: bool) -> None:
    """End the daemon of a directory, whatever its version, and wait until it has ended.

    It is found even if its directory was removed. force: even if programs hold slices; they go on.

    Raises DaemonUnavailable, UnsafeDirectory, ProtocolMismatch, RequestFailed, NotReplaced.
    """
    with _reach(runtime) as connection:
        pid = peer(connection).pid
        ending = os.pidfd_open(pid)
        try:
            answer = _request_stop(runtime, connection, force=force)
            if answer is None:
                _end_old(pid, ending, force=force)
            elif answer.type == "failure":
                raise client.RequestFailed(answer.reason)
            if not select.select([ending], [], [], END_TIMEOUT_S)[0]:
                raise NotReplaced(
                    f"the daemon, process {pid}, has not ended within {END_TIMEOUT_S:.0f} s: `kill {pid}`, "
                    "and its programs go on"
                )
        finally:
            os.close(ending)


def _reach(runtime: Runtime) -> socket.socket:
    """Connect to the daemon by its directory, or by its name if that was removed or replaced."""
    try:
        directory = runtime.open()
        try:
            connection = paths.connect(directory)
        finally:
            os.close(directory)
    except (OSError, UnsafeDirectory) as why:
        try:
            connection = paths.connect_to(runtime.name)
        except OSError:
            if isinstance(why, UnsafeDirectory):
                raise why from None
            raise client.DaemonUnavailable(client.unavailable_reason(runtime, why)) from None
    try:
        client.check_server(runtime, connection)
    except FenkaError:
        connection.close()
        raise
    connection.settimeout(client.START_TIMEOUT_S)
    return connection


def _request_stop(
    runtime: Runtime, connection: socket.socket, *, force: bool
) -> protocol.StopAnswer | None:
    """Return the daemon's answer; None if it is older than the request."""
    with connection.makefile("rb") as lines:
        try:
            connection.sendall(protocol.encode(protocol.StopDaemon(force)) + b"\n")
            protocol.decode_first_line(lines.readline(), runtime.socket)
            return protocol.decode_stop_answer(lines.readline())
        except ConnectionError:
            return None
        except TimeoutError:
            raise NotReplaced(
                f"the daemon, process {peer(connection).pid}, does not answer: `kill` ends it, and its "
                "programs go on"
            ) from None


def _end_old(pid: int, process: int, *, force: bool) -> None:
    if not force:
        raise client.RequestFailed(
            f"the daemon, process {pid}, is of an older version that cannot say whether programs run: add "
            "--force to end it; programs go on"
        )
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise client.RequestFailed(f"the daemon, process {pid}, is another user's") from None


def restart_daemon(runtime: Runtime, options: list[str]) -> None:
    """Replace the daemon by one of this build, or start one if none runs. Programs go on.

    The new one is ready to serve before the other is ended, so that no client starts one in between.

    Raises:
        NotReplaced: systemd runs the daemon.
        InvalidState: This build does not understand the other's records. Nothing was changed.
        DaemonUnavailable, UnsafeDirectory, RequestFailed: The daemon was not replaced.
    """
    files.load_config(runtime)
    files.load_jobs(runtime)
    files.load_layouts(runtime)
    client.await_return(runtime)
    _check_unit(runtime)

    def end_other() -> None:
        with contextlib.suppress(client.DaemonUnavailable):  # It has ended meanwhile.
            stop_daemon(runtime, force=True)

    client.start_daemon(runtime, ["--replace", *options], on_waiting=end_other)


def _check_unit(runtime: Runtime) -> None:
    try:
        with _reach(runtime) as connection:
            pid = peer(connection).pid
    except client.DaemonUnavailable:
        return
    unit = unit_of(pid)
    if unit:
        raise NotReplaced(
            f"systemd runs the daemon, process {pid}: `systemctl restart {unit}` goes over to this build, "
            "and programs go on if the unit has KillMode=process"
        )


def unit_of(pid: int) -> str:
    """Return the unit whose main process this is, if systemd has started it; else nothing."""
    process = procfs.PROC / str(pid)
    try:
        environment = (process / "environ").read_bytes().split(b"\0")
        groups = (process / "cgroup").read_text().split()
    except OSError:
        return ""
    if b"SYSTEMD_EXEC_PID=%d" % pid not in environment:
        return ""
    return next(
        (name for name in (Path(path).name for path in groups) if name.endswith(".service")), ""
    )


def daemon(
    context: typer.Context,
    config: DaemonConfig,
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
    card_reset: Annotated[
        list[str],
        typer.Option(
            "--card-reset",
            metavar="CARD",
            help="use a card again that was reset after an error, by index or UUID; repeatable",
        ),
    ] = [],  # noqa: B006 - typer copies it
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
        card_reset: Cards to use again.
        show_config: Print the options.
        resume: Use the configuration of the previous daemon, if it left one.
        replace: Wait for the end of the daemon that runs.
        background_child: start_daemon started this; stdout and stderr are its pipe until clients can connect.
        lifeline: End when standard input reaches its end.
        no_file: Do not read the file of options.
    """
    if sum((background, stop, restart, show_config, bool(card_reset))) > 1:
        raise UserError(
            "--background, --stop, --restart, --card-reset and --show-config exclude each other",
            INVALID_INPUT,
        )
    given = {
        name: getattr(config, name)
        for name in config.__struct_fields__
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    if stop:
        stop_daemon(paths.current(), force=force)
        print("the fenka daemon has ended")
    elif card_reset:
        _use_again(card_reset)
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


def _resolve(runtime: Runtime, given: dict[str, Any], *, no_file: bool = False) -> DaemonConfig:
    """Return the options of the command line, else the file's, else the defaults. Raises InvalidOption."""
    return DaemonConfig(**({} if no_file else main.load(runtime)) | given)


def _start(given: dict[str, Any]) -> None:
    runtime = paths.own()
    if runtime.answers():
        raise UserError("a fenka daemon already runs here: `fenka doctor` describes it")
    client.start_daemon(runtime, [*_words(_resolve(runtime, given)), "--no-file"])
    print("the fenka daemon is running; `fenka daemon --stop` ends it")


def _restart(given: dict[str, Any]) -> None:
    """Replace the daemon, with its options unless the command line has others."""
    runtime = paths.own()
    if paths.current().foreign and not runtime.answers():
        raise UserError(
            "root's daemon serves this machine, and you have none of your own: only root can replace "
            "it, with `sudo fenka daemon --restart`"
        )
    recorded = files.load_config(runtime)
    config = msgspec.structs.replace(recorded, **given) if recorded else _resolve(runtime, given)
    restart_daemon(runtime, [*_words(config), "--no-file"])
    with client.DaemonConnection(runtime) as connection:
        pid = connection.daemon_pid
    print(f"the fenka daemon is now process {pid}, build {build_id()}; programs went on")


def _use_again(cards: list[str]) -> None:
    """Have the running daemon use cards again. Raises DaemonUnavailable, RequestFailed, UserError."""
    with client.DaemonConnection(paths.current()) as connection:
        left = connection.request(protocol.ReportReset(cards), protocol.Done).text
    if left:
        raise UserError(left)
    print(f"used again: card {', '.join(cards)}")


def _show(runtime: Runtime, given: dict[str, Any]) -> None:
    """Print the options as a file has them, with their origin in comments."""
    from_file = main.load(runtime)
    config = DaemonConfig(**from_file | given)
    print(f"# the daemon's options; {runtime.options} may have them")
    for name, value in msgspec.structs.asdict(config).items():
        origin = (
            "the command line"
            if name in given
            else str(runtime.options)
            if name in from_file
            else "default"
        )
        if value is None:  # TOML has no word for it.
            continue
        print(f"{main.option_name(name)} = {json.dumps(value, ensure_ascii=False)}  # {origin}")
    running = files.load_config(runtime) if runtime.answers() else None
    for name, value in msgspec.structs.asdict(running).items() if running else ():
        if value != getattr(config, name):
            option = main.option_name(name)
            print(f"# the running daemon has {option} = {json.dumps(value, ensure_ascii=False)}")


def _words(config: DaemonConfig) -> list[str]:
    """Return a configuration as words of a command line."""
    words: list[str] = []
    for name, value in msgspec.structs.asdict(config).items():
        option = f"--{main.option_name(name)}"
        if isinstance(value, bool):
            words += [option] * value
            continue
        for word in filter(None, value if isinstance(value, list) else [value]):
            words += [option, str(word)]
    return words


def _serve(
    runtime: Runtime, config: DaemonConfig, replace: bool, background_child: bool, lifeline: bool
) -> None:
    ending = ShutdownSignals(0 if lifeline else None)
    # Now, when a reason to end can still be reported.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = client.open_log(str(runtime.log), flags) if background_child else None
    parent, waiting = os.getppid(), False
    reported = failing_start.take_reported()

    def ready(daemon: Daemon) -> None:
        if log is not None:
            _redirect_to_log(log)
        with contextlib.suppress(OSError):  # The disk is full: that is no reason to end.
            _announce(daemon)
        lifetime.notify("READY=1\nSTATUS=" if reported else "READY=1")

    def keep_waiting() -> bool:
        nonlocal waiting
        if replace and not waiting:
            waiting = True
            os.write(1, client.WAITING)
        return replace and not ending.signals and os.getppid() == parent

    try:
        ended = main.run(runtime, config, ready, ending, keep_waiting)
    except Exception as why:
        # Ctrl-C may have ended a program that the start needs, such as the simulated card server.
        if signal.SIGINT in ending.signals:
            raise KeyboardInterrupt from None
        if isinstance(why, NoDriver) and lifetime.environment():
            # Its unit has started, if only to say this: the machine's boot has not failed.
            lifetime.notify(f"READY=1\nSTATUS={why}")
            raise UserError(str(why), EXIT_NO_DRIVER) from None
        if isinstance(why, AlreadyRunning):
            code = client.EXIT_ALREADY_RUNNING if background_child else 1
            raise UserError(str(why), code) from None
        if isinstance(why, OSError) and lifetime.environment():
            _wait_for_room(runtime, why, reported, ending)
            return
        raise
    if ended.moved is not None and not ending.signals:
        environment = {
            **client.daemon_environment(runtime),
            **lifetime.environment(),
            **ended.moved,
        }
        _serve_again(environment, background_child, lifeline)
    if ended.jobs:
        print(f"fenka daemon: ended; {', '.join(ended.jobs)} go on, and the next daemon knows them")
    if signal.SIGINT in ending.signals:
        raise KeyboardInterrupt


def _wait_for_room(runtime: Runtime, why: OSError, reported: str, ending: ShutdownSignals) -> None:
    """Say once why a unit's daemon cannot start, and try again until it can. Return when it is to end."""
    sentence = describe_os_error(why)
    if sentence != reported:
        print_error(sentence)
    failing_start.try_again(runtime, sentence, lambda: bool(ending.signals))


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
    os.write(1, client.READY)
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
