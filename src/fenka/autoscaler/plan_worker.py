"""A process that makes plans, so that the leader renews its lease meanwhile. `planner.py` starts it.

It reads cases and writes plans, each after its length. It ends when its input does: so it never outlives the
program that started it.
"""

import sys
import time
from typing import BinaryIO

import msgspec

from fenka.autoscaler.inputs import decode_case
from fenka.autoscaler.solver import available_solver
from fenka.core.errors import InvalidCase
from fenka.core.nodes.plan import NodePlan, make_plan

LENGTH_BYTES = 8


class PlanRequest(msgspec.Struct):
    """A request for a plan. case: in `fenka.plan/1`. seconds: the time limit."""

    case: msgspec.Raw
    seconds: float


class PlanAnswer(msgspec.Struct):
    """A plan, or why there is none."""

    plan: NodePlan | None = None
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Answer until the input ends."""
    solver = available_solver(lambda sentence: print(sentence, file=sys.stderr))
    output = sys.stdout.buffer
    while (data := _read(sys.stdin.buffer)) is not None:
        request = msgspec.json.decode(data, type=PlanRequest)
        begin = time.monotonic()
        end = begin + request.seconds
        try:
            plan = make_plan(decode_case(request.case), lambda: end - time.monotonic(), solver)  # noqa: B023
            answer = PlanAnswer(plan, time.monotonic() - begin)
        except InvalidCase as why:
            answer = PlanAnswer(error=str(why))
        encoded = msgspec.json.encode(answer)
        output.write(len(encoded).to_bytes(LENGTH_BYTES) + encoded)
        output.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return stream.read(int.from_bytes(head))


if __name__ == "__main__":
    main()
