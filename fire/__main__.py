"""Run `python -m fire workstation|cluster [--seed N] [--moves N] [--minutes M]`; see fire/README.md."""

import argparse
import os
import sys
import time

from e2e.cluster import STATE, Cluster, ClusterError
from fire import containers, machine, workstation
from fire.experiment import InvariantViolation

UNLIMITED = 10**9


def main() -> int:
    """Run one experiment; return 1 after one line if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m fire", description=__doc__)
    parser.add_argument("world", choices=["workstation", "cluster"])
    parser.add_argument("--seed", type=int, default=None, help="repeat the actions of this seed")
    parser.add_argument("--moves", type=int, default=UNLIMITED, help="maximum number of actions")
    parser.add_argument("--minutes", type=float, default=20, help="maximum duration (20)")
    parser.add_argument("--calm", action="store_true", help="kill components, but do not attack")
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
    run = on_workstation if chosen.world == "workstation" else on_cluster
    try:
        done, counts = run(seed, chosen.moves, chosen.minutes * 60, not chosen.calm)
    except Exception as error:
        if not isinstance(error, (InvariantViolation, ClusterError)):
            raise
        print(f"fire: seed {seed}: {error}", file=sys.stderr)
        return 1
    print(f"{done} actions: {counts}\n1 passed, 0 failed", flush=True)
    return 0


Result = tuple[int, dict[str, int]]


def report(line: str) -> None:
    """Print progress without buffering."""
    print(line, flush=True)


def on_workstation(seed: int, moves: int, seconds: float, hostile: bool) -> Result:
    """Run on a workstation in its own namespaces."""
    image = containers.build_image()
    machine.isolate_files()
    experiment = workstation.WorkstationExperiment(seed, report, hostile, image)
    return experiment.run(moves, seconds), experiment.counts


def on_cluster(seed: int, moves: int, seconds: float, hostile: bool) -> Result:
    """Run on a new cluster, which is removed afterwards."""
    from e2e.images import image_store
    from e2e.scenarios.conftest import install
    from fire import cluster

    Cluster.require()
    target = Cluster(STATE, owner=os.getpid(), progress=report)
    try:
        target.up(image_store())
        install(target)
        experiment = cluster.ClusterExperiment(target, seed, report, hostile)
        with experiment.prepared():
            return experiment.run(moves, seconds), experiment.counts
    finally:
        target.down()


if __name__ == "__main__":
    sys.exit(main())
