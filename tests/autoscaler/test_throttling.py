"""An order whose call is throttled, when the call before it had no answer."""

from fenka.autoscaler.orders import refused
from fenka.cloud.port import Throttled, Unknown
from fenka.cluster.autoscaling import OrderRecord, Slot

ORDER = OrderRecord(
    group="t4",
    type="t4.x",
    zone="a",
    capacity="on-demand",
    slots=(Slot(),),
    state="written",
    price=4.0,
    written_at=0.0,
)


def test_token_is_kept_when_the_answer_is_unknown_or_the_call_is_throttled() -> None:
    """An earlier call may have launched what nobody has heard of."""
    for error in (Unknown("no answer"), Throttled(5.0)):
        assert refused(ORDER, error, 10.0).attempt == 0


def test_token_changes_when_throttling_is_the_clouds_answer_to_it() -> None:
    """The cloud would repeat this answer."""
    assert refused(ORDER, Throttled(5.0, spent=True), 10.0).attempt == 1
