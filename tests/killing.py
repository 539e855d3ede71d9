"""Programs that are killed between two of their steps."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fenka.hardware import nvml_mig
from fenka.mig import keeper

Step = tuple[Any, str]
"""A function, by its owner and name."""

INSTANCE_STEPS: tuple[Step, ...] = (
    (keeper, "save"),
    (nvml_mig, "create_gpu_instance"),
    (nvml_mig, "create_compute_instance"),
    (nvml_mig, "destroy_compute_instance"),
    (nvml_mig, "destroy_gpu_instance"),
)
"""Every change of a MIG instance or of its record."""


class KilledAt:
    """Ends the program before or after its nth step: that and all later steps fail.

    Attributes:
        left: how many more steps pass.
        done: whether a step has ended it.
    """

    def __init__(
        self,
        patched: pytest.MonkeyPatch,
        step: int,
        steps: Sequence[Step],
        killed: type[BaseException],
    ) -> None:
        self.done, self.left, self._killed = False, step, killed
        for owner, name in steps:
            patched.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            self._pass()
            result = real(*arguments, **options)
            self._pass()
            return result

        return step

    def _pass(self) -> None:
        if self.left == 0:
            self.done = True
            raise self._killed
        self.left -= 1
