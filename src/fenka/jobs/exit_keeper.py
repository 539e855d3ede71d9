"""Waits for a program in the background, and records how it ended: a process that does nothing else.

The program's own process cannot, because it was replaced by the program, and the command that started it has
ended. One small interpreter runs beside each program, so it imports nothing of fenka. If it is killed, only
the record is missing.

    python -I -S exit_keeper.py PID FILE
"""

import os
import sys
import time

HOLD_S = 0.5
"""The zombie stays for so long, for the daemon, on kernels that tell nobody else an exit code afterwards."""

TOLD_SINCE = (6, 15)


def keep(pid: int, file: str, hold_s: float) -> int:
    """Wait for a child and record its wait status and end. Return its exit code, as shells do."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # It is a zombie now, and the status is the kernel's.
    with open(f"/proc/{pid}/stat", "rb") as stat:
        status = int(stat.read().rpartition(b")")[2].split()[49])
    try:
        with open(file + ".new", "w") as record:
            record.write(f'{{"status": {status}, "ended_at": {time.time()}}}\n')
        os.replace(file + ".new", file)
    except OSError:
        pass  # the disk is full, or the job's directory is gone
    time.sleep(hold_s)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _hold_s() -> float:
    release = os.uname().release.split(".")
    try:
        return 0 if (int(release[0]), int(release[1].split("-")[0])) >= TOLD_SINCE else HOLD_S
    except (ValueError, IndexError):
        return HOLD_S


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2], _hold_s()))
