"""Instances are created and destroyed; whatever is killed between two steps is finished or undone later."""

from typing import Any

import pynvml
import pytest

from fenka.core.mig.geometry import Profile
from fenka.hardware import nvml_mig
from fenka.hardware.nvml_mig import InstanceInUse, NoRoomForInstance
from fenka.mig import keeper
from fenka.mig.keeper import InstanceKeeper
from tests.hardware.client import Client
from tests.killing import INSTANCE_STEPS, KilledAt
from tests.mig.machine import Killed, Machine


def test_instance_is_created_where_it_was_asked_for_and_destroyed(machine: Machine) -> None:
    """With the widest compute instance; its number is new each time, though its UUID is the same."""
    keeper = machine.keeper()
    first = keeper.create(machine.card, machine.place("3g.20gb", 4))
    assert machine.layout() == [("3g.20gb", 4, 1)]
    assert keeper.settle({first.uuid}) == []
    assert machine.layout() == [("3g.20gb", 4, 1)]
    assert keeper.settle(()) == []
    assert (machine.layout(), keeper.records) == ([], ())
    second = keeper.create(machine.card, machine.place("3g.20gb", 4))
    assert (second.uuid, second.generation) == (first.uuid, first.generation + 1)


def test_instance_stays_when_a_process_uses_it(machine: Machine) -> None:
    """It is destroyed once the process has ended; another one beside it is not touched."""
    keeper = machine.keeper()
    used = keeper.create(machine.card, machine.place("1g.5gb", 0))
    client = Client(machine.node.library_dir, CUDA_VISIBLE_DEVICES=used.uuid).enter()
    assert [each.generation for each in keeper.settle(())] == [used.generation]
    with pytest.raises(InstanceInUse, match="in use"):
        keeper.destroy(used)
    client.kill()
    assert keeper.settle(()) == []
    assert machine.layout() == []


def test_foreign_instances_stay_and_occupy_their_places(machine: Machine) -> None:
    """Also one that an administrator destroyed and created again."""
    keeper = machine.keeper()
    machine.administrator("2g.10gb", 0)
    with pytest.raises(NoRoomForInstance, match=r"1g.5gb at 1 of GPU-.* is taken by GPU instance"):
        keeper.create(machine.card, machine.place("1g.5gb", 1))
    own = keeper.create(machine.card, machine.place("1g.5gb", 6))
    assert own.gpu_instance is not None
    nvml_mig.destroy_compute_instance(machine.card, own.gpu_instance, 0)
    nvml_mig.destroy_gpu_instance(machine.card, own.gpu_instance)
    keeper.observe()
    machine.administrator("1g.5gb", 6)
    assert keeper.settle({own.uuid}) == keeper.settle(()) == []
    assert machine.layout() == [("1g.5gb", 6, 1), ("2g.10gb", 0, 1)]
    assert keeper.records == ()


@pytest.mark.parametrize("failing", ["GPU instance", "compute instance"])
def test_nothing_is_left_when_the_driver_refuses_a_creation(
    machine: Machine, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the GPU instance, or of the compute instance."""
    real = nvml_mig.create_gpu_instance

    def create(card: str, profile: Profile, start: int) -> int:
        if failing == "GPU instance":
            machine.node.fail_mig(0, 1)
        made = real(card, profile, start)
        machine.node.fail_mig(0, 1)
        return made

    monkeypatch.setattr(nvml_mig, "create_gpu_instance", create)
    keeper = machine.keeper()
    with pytest.raises(NoRoomForInstance, match="cannot be created: its place is taken"):
        keeper.create(machine.card, machine.place("2g.10gb", 0))
    assert (machine.layout(), keeper.records) == ([], ())


@pytest.mark.parametrize("administrator", ["nothing", "elsewhere", "same place"])
def test_kill_between_any_two_steps_leaves_nothing_behind(
    machine: Machine, administrator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator creates instances before the next start, also one just like fenka's in its place."""
    for step in range(60):
        expected: list[tuple[str, int, int]] = []
        with monkeypatch.context() as patched:
            killing = KilledAt(patched, step, INSTANCE_STEPS, Killed)
            try:
                keeper = machine.keeper()
                keeper.create(machine.card, machine.place("3g.20gb", 4))
                keeper.settle(())
                done = killing.left > 0
            except Killed:
                done = False
        created: list[int] = []
        for place, start in (("2g.10gb", 0), ("3g.20gb", 4)):
            wanted = {"elsewhere": 0, "same place": 4}.get(administrator)
            if start == wanted and not any(at == start for _, at, _ in machine.layout()):
                created.append(machine.administrator(place, start))
                expected = [(place, start, 1)]
        again = machine.keeper()
        assert again.settle(()) == []
        assert (machine.layout(), again.records) == (expected, ()), step
        assert again.create(machine.card, machine.place("1g.5gb", 3)).uuid
        assert again.settle(()) == []
        for gpu in created:
            nvml_mig.destroy_compute_instance(machine.card, gpu, 0)
            nvml_mig.destroy_gpu_instance(machine.card, gpu)
        if done:
            return
    raise AssertionError("the creation has more steps than this test tries")


def test_records_of_another_boot_do_not_count(machine: Machine) -> None:
    """Instances end with the machine, so what exists now is an administrator's."""
    machine.keeper().create(machine.card, machine.place("1g.5gb", 0))
    next_boot = InstanceKeeper(machine.path, "next", {machine.card: machine.geometry})
    assert next_boot.records == ()
    assert next_boot.settle(()) == []
    assert machine.layout() == [("1g.5gb", 0, 1)]


def test_damaged_records_are_refused_with_a_sentence(machine: Machine) -> None:
    """What they recorded is not guessed."""
    machine.path.write_text("{")
    with pytest.raises(
        keeper.InvalidRecords, match=r"is not understood .*: remove it, and destroy"
    ):
        machine.keeper()


def test_instance_is_not_taken_for_lost_when_another_vanishes_while_it_is_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's indices shift then, and one instance would be passed over."""
    keeper = machine.keeper()
    stays, vanishes = (
        keeper.create(machine.card, machine.place("1g.5gb", start)) for start in (1, 0)
    )
    real = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
    left = [vanishes.gpu_instance]

    def read(handle: Any, index: int) -> Any:
        if index == 1 and left:
            gpu = left.pop()
            assert gpu is not None
            nvml_mig.destroy_compute_instance(machine.card, gpu, 0)
        return real(handle, index)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", read)
    keeper.observe()
    assert [each.stage for each in keeper.records] == ["ready", "emptying"]
    assert keeper.records[0].uuid == stays.uuid
