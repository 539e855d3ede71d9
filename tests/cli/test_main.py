"""The table of commands: what `fenka --help` shows, and that each row leads to a command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.cli.common_options import percent, seconds
from fenka.cli.main import ADMIN, ADMIN_ROWS, COMMANDS, MORE, USERS_ROWS
from tests.cli.command import fenka

SHOWN = [row for rows in COMMANDS.values() for row in rows]
PROGRAMS = ADMIN["Programs of the chart"]

SHARED_OPTIONS = {
    "--output": "-o, --output",
    "--namespace": "-n, --namespace",
    "--details": "-d, --details",
    "--detach": "-d, --detach",
}
"""Options that several commands have, as every command shows them. Programs of the chart have their own."""


def subcommands(name: str) -> list[tuple[str, ...]]:
    """Return the words of a command, or of all commands of a group."""
    text = fenka(name, "--help").stdout
    _, found, listed = text.partition("\nCommands:\n")
    return [(name, line.split()[0]) for line in listed.splitlines()] if found else [(name,)]


def titles(text: str) -> list[str]:
    """Return the titles of a help's groups."""
    return [line[:-1] for line in text.splitlines() if line[0].isupper() and line.endswith(":")]


def test_help_fits_a_terminal_and_lists_commands_by_purpose() -> None:
    """One line per command that users need often, in the groups of the table."""
    text = fenka("--help").stdout
    lines = text.splitlines()
    assert titles(text) == [*COMMANDS]
    assert all(f"  {row.name} " in text and row.summary in text for row in SHOWN)
    assert [row.name for row in MORE] == text.partition("More: ")[2].splitlines()[0].split(", ")
    assert not any(re.search(rf"^  {row.name} ", text, re.M) for row in ADMIN_ROWS)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_help_of_admin_lists_what_operators_need() -> None:
    """Commands about the workstation's daemon, the cluster, simulations, and the chart's programs."""
    text = fenka("admin", "--help").stdout
    assert titles(text) == [*ADMIN]
    assert all(f"  {row.name} " in text and row.summary in text for row in ADMIN_ROWS)
    assert fenka("admin").exit_code == 2


@pytest.mark.parametrize("name", [row.name for row in ADMIN_ROWS])
def test_command_of_operators_works_without_admin(name: str) -> None:
    """Units, charts and scripts of earlier versions have the short form."""
    long, short = fenka("admin", name, "--help"), fenka(name, "--help")
    assert long.exit_code == short.exit_code == 0
    assert long.stdout.replace("fenka admin ", "fenka ") == short.stdout


@pytest.mark.parametrize("program", [row.name for row in PROGRAMS])
def test_program_imports_no_other_program(program: str) -> None:
    """Each of them runs in a pod of its own, with little memory."""
    others = {row.name.replace("-", "_") for row in PROGRAMS} - {program.replace("-", "_")}
    script = (
        "import sys; from fenka.cli.main import run\n"
        f"try: run([{program!r}, '--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted({{f'fenka.{{name}}.main' for name in {others}}} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [row.name for row in (*USERS_ROWS, *ADMIN_ROWS)])
def test_command_shows_its_help(name: str) -> None:
    """Each row's module has the function, and its options can be read. A letter stands for one of them."""
    for words in subcommands(name):
        result = fenka(*words, "-h")
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: fenka ")
        names = re.findall(r"^  (-\w)\b", result.stdout, re.M)
        assert len(names) == len(set(names)), names


@pytest.mark.parametrize(
    "name", [row.name for row in (*USERS_ROWS, *ADMIN_ROWS) if row not in PROGRAMS]
)
def test_shared_option_has_one_spelling_in_all_commands(name: str) -> None:
    """Users learn an option once."""
    for words in subcommands(name):
        text = fenka(*words, "--help").stdout
        for option, spelling in SHARED_OPTIONS.items():
            lines = [line for line in text.splitlines() if re.match(rf"  (-\w, )?{option}\b", line)]
            assert all(line.strip().startswith(spelling) for line in lines), (words, lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quueue",), "there is no command quueue: did you mean queue?"),
        (("--nope",), "there is no option --nope: `fenka --help` lists all"),
        (("admin", "daemno"), "there is no command daemno: did you mean daemon?"),
        (("admin", "run"), "there is no command run: `fenka admin --help` lists all"),
        (("queue", "--nope"), "there is no option --nope: `fenka queue --help` lists all"),
        (("list", "--al-namespaces"), "did you mean --all-namespaces"),
        (("help", "quueue"), "there is no command quueue: did you mean queue?"),
        (("serve", "lst"), "there is no command lst: did you mean list"),
        (("serve", "nosuch"), "there is no command nosuch: `fenka serve --help` lists all"),
        (("why",), "`fenka why` needs NAME: `fenka why --help` explains it"),
        (("traffic-split", "a"), "`fenka traffic-split` needs --name: "),
        (
            ("quota", "x"),
            "x is more than `fenka quota` takes: `fenka quota --help` shows its words",
        ),
        (("run", "--gpu-mem"), "--gpu-mem needs a value: `fenka run --help` explains it"),
        (("top", "--watch=x"), "--watch takes no value: write it without one"),
        (("logs", "a", "--tail", "1.5"), "--tail: '1.5' is no whole number"),
        (("dashboard", "--port", "99999999"), "--port: 99999999 is not from 1 to 65535"),
        (("dashboard", "--usage-port", "0"), "--usage-port: 0 is less than 1"),
        (("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (
            ("run", "--timeout", "1x"),
            "--timeout: '1x' is no time: write seconds, or as 90s, 5m or 2h",
        ),
        (("wait", "a", "--timeout", "nan"), "'nan' is no time"),
        (("run", "--gpus", "0.5"), "'0.5' is no number of whole cards: a part of one is asked"),
        (("run", "--gpu-core", "101%"), "'101%' is no percentage: write 0 to 100"),
        (("run", "--gang", "x"), "'x' is no whole number"),
    ],
)
def test_usage_error_exits_with_2(words: tuple[str, ...], message: str) -> None:
    """With one sentence of fenka's own, on stderr."""
    result = fenka(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert re.fullmatch(r"fenka: .*[^.:]\n", result.stderr)


@pytest.mark.parametrize(
    ("text", "expected"), [("60", 60.0), ("0.5", 0.5), ("1m", 60.0), ("1h30m", 5400.0), ("0", 0.0)]
)
def test_time_is_seconds_when_it_has_no_unit(text: str, expected: float) -> None:
    """As other options have durations."""
    assert seconds(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("50%", 50), ("50", 50), ("0", 0)])
def test_share_is_read_when_it_ends_in_a_percent_sign(text: str, expected: int) -> None:
    """Screens show it so."""
    assert percent(text) == expected


def test_help_of_the_dashboard_has_options_of_clusters_when_one_is_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By an option, a variable, or a kubeconfig. On a workstation they mean nothing."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    here = fenka("dashboard", "-h").stdout
    assert "--read-only" in here
    assert "--prometheus" not in here
    assert "11 more: `fenka dashboard --cluster --help`" in " ".join(here.split())
    assert "--prometheus" in fenka("dashboard", "--cluster", "-h").stdout
    monkeypatch.setenv("FENKA_WORLD", "cluster")
    assert "--usage-file" in fenka("dashboard", "--help").stdout
    monkeypatch.delenv("FENKA_WORLD")
    (tmp_path / "absent").write_text("")
    assert "--proxy-secret" in fenka("dashboard", "-h").stdout


@pytest.mark.parametrize("words", [(), ("run",), ("admin",), ("admin", "mig")])
def test_help_is_shown_when_it_is_asked_for_as_a_command(words: tuple[str, ...]) -> None:
    """As git and kubectl have it."""
    assert fenka("help", *words) == fenka(*words, "--help")


@pytest.mark.parametrize(
    ("shell", "expected"),
    [("bash", "complete -o bashdefault"), ("zsh", "#compdef fenka"), ("fish", "complete -c fenka")],
)
def test_completion_is_printed_when_it_is_asked_for(shell: str, expected: str) -> None:
    """For installations by pip or uv, whose files no shell finds."""
    printed = fenka("completion", shell).stdout
    assert expected in printed
    assert "traffic-split" in printed


def test_stop_refuses_names_with_all() -> None:
    """One of them is a mistake, and nothing is stopped."""
    for words in ((), ("a", "--all")):
        result = fenka("stop", *words, "--local")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "name the jobs to stop, or give --all alone" in result.stderr


def test_version_is_printed() -> None:
    """As `fenka doctor` and the daemon print it."""
    assert re.fullmatch(r"fenka \d+\.\d+\.\d+\n", fenka("--version").stdout)
    assert fenka("version") == fenka("--version")


def test_help_imports_no_command() -> None:
    """So that it appears at once: neither typer nor a client of Kubernetes is loaded."""
    program = (
        "import sys; from fenka.cli.main import help_text; help_text();"
        "print(sorted({'typer', 'msgspec', 'asyncio', 'fenka.workstation'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("alias", "name"), [(alias, row.name) for row in USERS_ROWS for alias in row.aliases]
)
def test_alias_is_the_command(alias: str, name: str) -> None:
    """arena's users type `ls`, `log` and `del`."""
    assert fenka(alias, "--help").stdout == fenka(name, "--help").stdout


def test_option_in_camel_case_is_todays_option() -> None:
    """With arena's notice, but not for options that do not exist."""
    known = fenka("list", "--allNamespaces", "--local")
    notice = "Flag --allNamespaces has been deprecated, please use --all-namespaces instead\n"
    assert known.stderr.startswith(notice)
    unknown = fenka("list", "--noSuchThing").stderr
    assert "there is no option --no-such-thing" in unknown
    assert "deprecated" not in unknown


def test_words_after_two_dashes_stay_as_they_are() -> None:
    """They are another program's."""
    result = fenka("attach", "j", "--local", "--", "x", "--kubeConfig")
    assert "deprecated" not in result.stderr


@pytest.mark.parametrize(
    ("words", "before", "code", "last"),
    [
        (["--version"], "atexit.register(print, 'last')", 0, "last"),
        (["nope"], "atexit.register(print, 'last')", 2, "last"),
        # A thread that ends after the main thread is waited for, as always.
        (["--version"], "threading.Thread(target=later).start()", 0, "later"),
    ],
)
def test_everything_is_written_when_a_process_ends_at_once(
    words: list[str], before: str, code: int, last: str
) -> None:
    """No object is freed one by one at the end, but exit functions run and threads are waited for."""
    script = f"""
import atexit, sys, threading
from fenka.__main__ import main
def later():
    threading.main_thread().join()
    print("later")
{before}
sys.argv[1:] = {words!r}
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (code, [last])
