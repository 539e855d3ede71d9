"""`python -m fire workstation|cluster [--seed N] [--moves N] [--minutes M]`: see fire/README.md."""

import argparse
import os
import sys
import time

from e2e.cluster import STATE, Cluster, ClusterError
from fire import machine, workstation
from fire.experiment import InvariantViolation

LONG = 10**9


def main() -> int:
    """Run one storm; exit code 1 and one line where the audit found something."""
    parser = argparse.ArgumentParser(prog="python -m fire", description=__doc__)
    parser.add_argument("world", choices=["workstation", "cluster"])
    parser.add_argument("--seed", type=int, default=None, help="the same moves again")
    parser.add_argument("--moves", type=int, default=LONG, help="at most so many")
    parser.add_argument("--minutes", type=float, default=20, help="at most so long (20)")
    parser.add_argument("--calm", action="store_true", help="kills only, no hostile user")
    chosen = parser.parse_args()
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 100_000
    if chosen.world == "workstation" and machine.INSIDE not in os.environ:
        limits = ["--moves", str(chosen.moves), "--minutes", str(chosen.minutes)]
        limits += ["--calm"] * chosen.calm
        try:
            return machine.run_inside([chosen.world, "--seed", str(seed), *limits])
        except machine.CannotRun as error:
            print(f"fire: {error}", file=sys.stderr)
            return 2
    print(f"{chosen.world}: seed {seed}", flush=True)
    until = time.monotonic() + chosen.minutes * 60
    run = on_workstation if chosen.world == "workstation" else on_cluster
    try:
        made, counts = run(seed, chosen.moves, until, not chosen.calm)
    except Exception as error:
        if not isinstance(error, (InvariantViolation, ClusterError)):
            raise
        print(f"fire: seed {seed}: {error}", file=sys.stderr)
        return 1
    print(f"{made} moves: {counts}\n1 passed, 0 failed", flush=True)
    return 0


Result = tuple[int, dict[str, int]]


def say(line: str) -> None:
    """Print progress at once."""
    print(line, flush=True)


def on_workstation(seed: int, moves: int, until: float, hostile: bool) -> Result:
    """Inside a machine of its own."""
    machine.isolate_files()
    experiment = workstation.WorkstationExperiment(seed, say, hostile)
    return experiment.run(moves, until), experiment.counts


def on_cluster(seed: int, moves: int, until: float, hostile: bool) -> Result:
    """On a cluster that is started for it, or on the one that runs."""
    from e2e.images import image_store
    from e2e.scenarios.conftest import install
    from fire import cluster

    Cluster.require()
    world = Cluster(STATE, owner=os.getpid(), progress=say)
    try:
        world.up(image_store())
        install(world)
        experiment = cluster.ClusterExperiment(world, seed, say, hostile)
        with experiment.prepared():
            return experiment.run(moves, until), experiment.counts
    finally:
        world.down()


if __name__ == "__main__":
    sys.exit(main())
