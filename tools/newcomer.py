"""Times the first ten minutes of four newcomers, by the commands of the pages that they read.

    python -m tools.newcomer home WHEEL [ROOT]   # as root; ROOT: a Debian, made by debootstrap if absent
    python -m tools.newcomer cluster             # as root: on the cluster of e2e, from nothing installed
    python -m tools.newcomer gpushare            # the same, beside gpushare's running pods
    python -m tools.newcomer lab FILE            # times that `FENKA_DOCS_TIMES=FILE make vm` has written

Each run writes its times into docs/measurements/newcomer.toml. `make reference` makes the page of them.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.docs.blocks import PageError, read_page, steps
from tools.docs.shell import TIMES, Shell

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "measurements" / "newcomer.toml"
USER = 1000
GUIDE = "e2e/scenarios/test_guide.py"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A person.

    Attributes:
        title: Who it is.
        page: The page that they follow.
        blocks: How each of their blocks begins, in order. Empty: a test of the guide runs them.
        test: That test.
    """

    title: str
    page: str
    blocks: tuple[str, ...] = ()
    test: str = ""


NEWCOMERS = {
    "home": Newcomer(
        "One card at home",
        "start/one-card.md",
        (
            "python3 -m venv ~/fenka",
            "fenka demo --check",
            "fenka daemon --background --simulate T4",
            "fenka run --gpu-mem 4 -- python3 train.py",
            "fenka doctor",
        ),
    ),
    "lab": Newcomer("A lab's server", "start/lab-server.md"),
    "cluster": Newcomer(
        "A company's cluster",
        "start/cluster.md",
        test="test_commands_from_installation_to_removal_work_when_run_verbatim",
    ),
    "gpushare": Newcomer(
        "From gpushare",
        "from/gpushare.md",
        test="test_gpushare_pods_keep_their_cards_when_the_cluster_is_migrated",
    ),
}

ENTER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
for place in proc sys dev tmp; do mkdir -p "$root/$place"; done
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount --rbind /tmp "$root/tmp"
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
umount -l /.old
cd "$HOME"
exec setpriv --reuid 1000 --regid 1000 --clear-groups "$@"
"""
"""Makes a directory the root of a command that an ordinary user runs.

It is no chroot, since in one nobody can make a user namespace.
"""

PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE")
"""Variables of this machine by which pip reaches the packages."""


def make_root(root: Path) -> None:
    """Make a Debian with Python and nothing else, unless there is one."""
    if (root / "etc" / "debian_version").exists():
        return
    include = "--include=python3-venv,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, "stable", str(root)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    bundle = Path("etc/ssl/certs/ca-certificates.crt")
    shutil.copy(Path("/") / bundle, root / bundle)
    with (root / "etc" / "passwd").open("a") as file:
        file.write(f"ada:x:{USER}:{USER}::/home/ada:/bin/bash\n")


def at_home(newcomer: Newcomer, wheel: Path, root: Path) -> list[tuple[str, float]]:
    """Run the page's blocks as an ordinary user of a clean machine. Returns their times."""
    make_root(root)
    home = root / "home" / "ada"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    shutil.copy(wheel, home)
    (home / "train.py").write_text('print("epoch 1", flush=True)\n')
    for path in (home, *home.iterdir()):
        os.chown(path, USER, USER)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    environment = {
        "HOME": "/home/ada",
        "USER": "ada",
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
    }
    prefix = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        ENTER,
        "sh",
        str(root),
    ]
    page = read_page(ROOT / "docs" / newcomer.page)
    commands = list(_blocks(newcomer, [block.text for block in page.blocks]))
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as times:
        os.environ[TIMES] = times.name
        with Shell(home, environment, prefix, shared=True) as shell:
            for command in commands:
                code, printed = shell.run(command)
                if code:
                    raise PageError(f"exit code {code} of\n{command}\n\n{printed}")
                print(f"{command.strip().splitlines()[0]}\n{printed[-400:]}")
        return _times(Path(times.name))


def _blocks(newcomer: Newcomer, texts: list[str]) -> Iterator[str]:
    """Yield the newcomer's commands. One that is in no block stands in the page's text."""
    for start in newcomer.blocks:
        text = next((text for text in texts if text.startswith(start)), start)
        yield from (step.command for step in steps(text))


def on_the_cluster(newcomer: Newcomer) -> list[tuple[str, float]]:
    """Run the guide's test, whose shell notes the time of each command. Returns these."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as times:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            GUIDE,
            "-k",
            newcomer.test,
        ]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, TIMES: times.name})
        return _times(Path(times.name))


def _times(file: Path) -> list[tuple[str, float]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["command"], row["seconds"]) for row in rows]


def save(name: str, times: list[tuple[str, float]]) -> None:
    """Write one newcomer's times beside those of the others."""
    known = tomllib.loads(DATA.read_text()) if DATA.exists() else {}
    known[name] = {
        "date": datetime.now(UTC).date(),
        "machine": f"{os.cpu_count()} virtual CPUs, {platform.machine()}",
        "load": round(os.getloadavg()[0]),
        "steps": [{"command": command, "seconds": round(seconds, 1)} for command, seconds in times],
    }
    parts = ["# Written by tools/newcomer.py."]
    for key in NEWCOMERS:
        if key in known:
            person = known[key]
            rows = "".join(
                f"  {{command = {json.dumps(step['command'], ensure_ascii=False)}, "
                f"seconds = {step['seconds']}}},\n"
                for step in person["steps"]
            )
            parts.append(
                f"[{key}]\ndate = {person['date']}\nmachine = {json.dumps(person['machine'])}\n"
                f"load = {person['load']}\nsteps = [\n{rows}]"
            )
    DATA.write_text("\n\n".join(parts) + "\n")


def main(arguments: list[str]) -> int:
    """Time one newcomer."""
    match arguments:
        case ["home", wheel, *rest]:
            root = Path(rest[0] if rest else "/var/tmp/fenka-newcomer")
            times = at_home(NEWCOMERS["home"], Path(wheel), root)
        case [("cluster" | "gpushare") as name]:
            times = on_the_cluster(NEWCOMERS[name])
        case ["lab", file]:
            times = _times(Path(file))
        case _:
            print(__doc__)
            return 2
    save(arguments[0], times)
    print(f"{sum(seconds for _, seconds in times):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
