"""Boots: in order, by a power loss, and a command that is faster than the daemon."""

import json
import re

import pytest

from vm.guest import Guest
from vm.test_package import jobs, start

SLOW = """\
mkdir -p /etc/systemd/system/fenka.service.d
cat > /etc/systemd/system/fenka.service.d/slow.conf <<'END'
[Service]
ExecStartPre=/bin/sh -c 'until [ -e /run/go ]; do sleep 0.1; done'
END
sync
"""
"""Delays the daemon until a file exists."""


def test_command_waits_when_the_daemon_has_not_started_yet(guest: Guest) -> None:
    """After a boot a login may be faster."""
    guest.run(SLOW)
    guest.reboot()
    assert guest.attempt("systemctl is-active fenka").stdout == "activating\n"
    guest.run(
        "systemd-run --quiet --unit=early --remain-after-exit --uid=alice -E HOME=/home/alice "
        "fenka run --gpu-mem 4 -- echo granted"
    )
    guest.until("journalctl -u early -o cat --no-pager", lambda text: "waiting for this" in text)
    guest.run("touch /run/go")
    guest.until("journalctl -u early -o cat --no-pager", lambda text: "granted" in text)


@pytest.mark.parametrize("way", ["reboot", "lose_power"])
def test_next_morning_tells_how_a_program_ended(guest: Guest, way: str) -> None:
    """The log is there, the card is free, and the record says that the machine has restarted."""
    guest.run(
        "fenka run --gpu-mem 5 -d --name night -- sh -c 'echo step 1; sync; exec sleep 30000'",
        "alice",
    )
    guest.until("fenka logs night", lambda text: "step 1" in text, "alice")
    start(guest, "bob", "other")
    # The disk has what a machine that runs for a minute has on it.
    guest.until("cat /var/lib/fenka/running-*.json", lambda text: '"other"' in text)
    guest.run("sync")
    getattr(guest, way)()
    guest.run("fenka run --gpu-mem 14 --timeout 900 -- true", "alice")
    assert jobs(guest) == {}
    shown = guest.attempt("fenka logs night", "alice")
    assert shown.stdout == "step 1\n"
    # In an orderly reboot the daemon may see the program end, or end before.
    told = r"the machine restarted" if way == "lose_power" else r"the machine restarted|SIGTERM"
    assert re.search(told, shown.stderr)
    ended = json.loads(guest.run("fenka ps -a -o json", "alice"))["ended"]
    reasons = {f"{job['user']}/{job['name']}": job["why"] for job in ended}
    assert re.search(told, reasons["alice/night"])
    assert re.search(told, reasons["bob/other"])
