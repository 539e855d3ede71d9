"""A training that computes until it is told to end, and goes on from its step after an eviction.

Each member appends its steps to the claim of checkpoints: {"at": …, "step": …, "attempt": …}. The last one is
where it goes on. It ends when the file `end` is there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from numba import cuda

CLAIM, STEP_S = Path(os.environ.get("CHECKPOINTS", "/checkpoint")), 0.25
rank, attempt = os.environ["RANK"], int(os.environ["FENKA_RESTARTS"])
steps = CLAIM / f"steps-{rank}"
# A member that was killed while it wrote leaves a part of a line.
lines = (
    [line for line in steps.read_text().splitlines(True) if line.endswith("}\n")]
    if steps.exists()
    else []
)
step = json.loads(lines[-1])["step"] if lines else 0
# A process with PID 1 ignores SIGTERM otherwise. The step that has begun is not saved.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@cuda.jit
def learn(states):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Change the states; on a simulated card only its time counts."""
    states[cuda.grid(1)] += 1


states = cuda.to_device(np.zeros(8 << 18, np.int32))
sys.stdout.write(f"rank={rank} first={step} attempt={attempt}\n")
with steps.open("a") as log:
    while not (CLAIM / "end").exists():
        learn[1, 256](states)
        cuda.synchronize()
        time.sleep(STEP_S)
        step += 1
        log.write(json.dumps({"at": time.time(), "step": step, "attempt": attempt}) + "\n")
        log.flush()
