"""Shares of compute: requested, shown, fed back, and changed while the program runs."""

import json

from fenka.isolation import lease_control
from fenka.isolation.lease_control import layout
from tests.workstation.conftest import HOLD, Workstation, eventually, refused


def limit(t4: Workstation, name: str) -> lease_control.Limit:
    """Return the limit of the job's first card from its control page."""
    page = t4.root / "leases" / t4.jobs()[name]["id"] / "lease" / "control"
    return lease_control.read(page).limits[0]


def yields(t4: Workstation, name: str) -> bool:
    """Return whether the job's programs yield to shares and weights."""
    page = t4.root / "leases" / t4.jobs()[name]["id"] / "lease" / "control"
    return bool(layout().from_buffer("struct fenka_control *", page.read_bytes()).yielding_since)


def last_feedback(t4: Workstation, name: str) -> int:
    """Return when the daemon last sent feedback to the job's programs; 0 for never."""
    page = t4.root / "leases" / t4.jobs()[name]["id"] / "lease" / "control"
    data = page.read_bytes()
    return int(layout().from_buffer("struct fenka_control *", data).cards[0].feedback_at)


def test_compute_share_is_enforced_shown_and_reserved(t4: Workstation) -> None:
    """60 and 40 percent are a whole card; a weight reserves nothing."""
    t4.run("--gpu-mem", "1", "--gpu-core", "60", "--name", "a", "--", *HOLD, "1").report()
    soft = ("--gpu-core", "40", "--gpu-core-mode", "soft")
    t4.run("--gpu-mem", "1", *soft, "--name", "b", "--", *HOLD, "1").report()
    assert (limit(t4, "a").compute_percent, limit(t4, "a").compute_mode) == (60, "hard")
    assert (limit(t4, "b").compute_percent, limit(t4, "b").compute_mode) == (40, "soft")
    lines = t4.ok("ps").splitlines()
    assert "60%" in lines[1]
    assert "40% soft" in lines[2]
    refused(
        t4.fenka("run", "--gpu-mem", "1", "--gpu-core", "1", "--no-wait", "--", "true"),
        75,
        r"no GPU fits: 1 of 1 has too little compute.*",
    )
    weight = ("--gpu-core", "50", "--gpu-core-mode", "weight")
    t4.run("--gpu-mem", "1", *weight, "--name", "c", "--", *HOLD, "1").report()
    assert limit(t4, "c").compute_mode == "weight"
    (node,) = json.loads(t4.ok("top", "node", "-o", "json"))
    assert node["cards"][0]["core"] == 100
    rows = {row["name"]: (row["core_mode"], row["weight"]) for row in node["programs"]}
    assert rows == {"a": ("hard", 0), "b": ("soft", 0), "c": ("weight", 50)}


def test_compute_feedback_goes_on_when_the_daemon_was_killed(t4: Workstation) -> None:
    """The next daemon sends feedback again."""
    t4.run("--gpu-mem", "1", "--gpu-core", "60", "--name", "a", "--", *HOLD, "1").report()
    first = eventually(lambda: last_feedback(t4, "a"))
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    eventually(lambda: last_feedback(t4, "a") > first + 1_000_000_000)


def test_limits_change_when_a_running_job_is_resized(t4: Workstation) -> None:
    """Memory and compute can grow and shrink. An impossible resize is refused and changes nothing."""
    t4.run("--gpu-mem", "4", "--gpu-core", "30", "--name", "a", "--", *HOLD, "2000").report()
    t4.run("--gpu-mem", "4", "--gpu-core", "50", "--name", "b", "--", *HOLD, "1").report()
    assert t4.ok("resize", "a", "--gpu-core", "50", "--gpu-core-mode", "soft") == "a: resized\n"
    assert limit(t4, "a") == lease_control.Limit(
        limit(t4, "b").uuid, 4308 << 20, limit(t4, "b").context_bytes, 50, "soft"
    )
    refused(t4.fenka("resize", "a", "--gpu-core", "51"), 1, r"a cannot grow: its cards have no .*")
    refused(t4.fenka("resize", "a", "--gpu-mem", "13"), 1, r"a cannot grow: its cards have no .*")
    refused(
        t4.fenka("resize", "a", "--gpu-mem", "1"),
        1,
        r"GPU-\S+ cannot shrink to 1077 MiB: the lease's programs hold 2\d\d\d MiB of it; .*",
    )
    refused(t4.fenka("resize", "a"), 2, r"nothing to change: .*")
    refused(t4.fenka("resize", "nobody", "--gpu-mem", "1"), 1, r"no job is called nobody: .*")
    assert limit(t4, "a").compute_percent == 50
    t4.ok("resize", "a", "--gpu-mem", "3", "--gpu-core", "0")
    assert limit(t4, "a").memory_bytes == 3231 << 20
    assert (limit(t4, "a").compute_percent, limit(t4, "a").compute_mode) == (100, "hard")
    (piece,) = t4.jobs()["a"]["slices"]
    assert (piece["memory_mib"], piece["compute"]) == (3231, 0)
    t4.ok("resize", "b", "--gpu-core", "100")  # what was given back can be had


def test_pending_job_starts_when_another_shrinks(t4: Workstation) -> None:
    """A request that waits for compute starts when another job's share is reduced."""
    t4.run("--gpu-mem", "1", "--gpu-core", "80", "--name", "a", "--", *HOLD, "1").report()
    waiting = t4.run("--gpu-mem", "1", "--gpu-core", "30", "--name", "b", "--", *HOLD, "1")
    assert "too little compute" in waiting.says()
    t4.ok("resize", "a", "--gpu-core", "70")
    assert waiting.report()["cards"][0]["result"] == 0


def test_resize_is_kept_when_the_daemon_was_killed(t4: Workstation) -> None:
    """The next daemon knows the new size."""
    t4.run("--gpu-mem", "4", "--gpu-core", "30", "--name", "a", "--", *HOLD, "1").report()
    t4.ok("resize", "a", "--gpu-mem", "2", "--gpu-core", "20")
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    (piece,) = t4.jobs()["a"]["slices"]
    assert (piece["memory_mib"], piece["compute"]) == (2154, 20)


def test_page_changes_when_only_mode_or_weight_is_resized(t4: Workstation) -> None:
    """Weights reserve nothing, so the slices stay as they are."""
    t4.run("--gpu-mem", "1", "--gpu-core", "30", "--name", "a", "--", *HOLD, "1").report()
    t4.ok("resize", "a", "--gpu-core-mode", "soft")
    assert (limit(t4, "a").compute_percent, limit(t4, "a").compute_mode) == (30, "soft")
    t4.ok("resize", "a", "--gpu-core", "20", "--gpu-core-mode", "weight")
    t4.ok("resize", "a", "--gpu-core", "80")
    assert (limit(t4, "a").compute_percent, limit(t4, "a").compute_mode) == (80, "weight")


def test_program_without_compute_yields_while_others_have_a_share(t4: Workstation) -> None:
    """Also to those that come and go while it runs, and beside the next daemon. Its page stays as it is."""
    t4.run("--gpu-mem", "1", "--name", "a", "--", *HOLD, "1").report()
    assert not yields(t4, "a")
    t4.run("--gpu-mem", "1", "--gpu-core", "80", "--name", "b", "--", *HOLD, "1").report()
    eventually(lambda: yields(t4, "a"))
    assert not yields(t4, "b")
    assert limit(t4, "a").unlimited
    t4.ok("resize", "b", "--gpu-core", "0")
    eventually(lambda: not yields(t4, "a"))
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    t4.ok("resize", "b", "--gpu-core", "80", "--gpu-core-mode", "weight")
    eventually(lambda: yields(t4, "a"))


def test_program_that_requested_all_of_a_card_does_not_yield(t4: Workstation) -> None:
    """It has a share like any other, until it gives that up."""
    weight = ("--gpu-core", "5", "--gpu-core-mode", "weight")
    t4.run("--gpu-mem", "1", "--gpu-core", "100", "--name", "a", "--", *HOLD, "1").report()
    t4.run("--gpu-mem", "1", *weight, "--name", "b", "--", *HOLD, "1").report()
    t4.run("--gpu-mem", "1", "--name", "c", "--", *HOLD, "1").report()
    eventually(lambda: yields(t4, "c"))
    assert not yields(t4, "a")
    t4.ok("resize", "a", "--gpu-core", "0")
    eventually(lambda: yields(t4, "a"))
    t4.ok("resize", "a", "--gpu-core", "100")
    eventually(lambda: not yields(t4, "a"))
