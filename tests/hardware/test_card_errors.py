"""Errors after which cards are not used, whatever happens in which order."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from fenka.hardware.card_errors import CardErrors
from fenka.hardware.xids import is_fatal_xid

CARDS = ("GPU-a", "GPU-b")
INSTANCES = ("GPU-a/0/1g.5gb", "GPU-b/4/3g.20gb")
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("xid"),
            st.sampled_from((*CARDS, *INSTANCES)),
            st.sampled_from((13, 31, 48, 63, 79, 94, 119)),
        ),
        st.tuples(st.sampled_from(("returned", "reset")), st.sampled_from(CARDS), st.just(0)),
    )
)


@given(STEPS)
def test_only_a_reset_makes_a_sick_card_usable(steps: list[tuple[str, str, int]]) -> None:
    """What was saved last is what is known, and a new process knows the same."""
    saved: list[Mapping[str, str]] = [{}]
    errors, sick = CardErrors(save=saved.append), set[str]()
    for step, key, xid in steps:
        if step == "xid":
            assert errors.report_xid([key], xid) == is_fatal_xid(xid)
            sick |= {key} if is_fatal_xid(xid) else set()
        elif step == "returned":
            errors.clear_returned({key})
            sick.discard(key)
        else:
            errors.clear_reset({key})
            sick = {other for other in sick if other.partition("/")[0] != key}
        assert {key for key in (*CARDS, *INSTANCES) if errors.get(key)} == sick == saved[-1].keys()
    after = CardErrors(saved[-1])
    assert all(after.get(key) == errors.get(key) for key in (*CARDS, *INSTANCES))
