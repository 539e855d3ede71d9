"""Tests the errors of the port."""

import pytest

from fenka.cloud.port import MAX_MESSAGE, Denied, Unknown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "code: 403, not authorized for ecs:RunInstances request id: 8C0E2A37-{}",
            "code: 403, not authorized for ecs:RunInstances",
        ),
        ("not found (RequestId: 1234{})", "not found"),
        (
            "arn:aws:sts::1:assumed-role/x is not authorized. "
            "Encoded authorization failure message: 4GIOHlTk{}-I_z",
            "arn:aws:sts::1:assumed-role/x is not authorized.",
        ),
        (
            "signature nonce 1b4e28ba-2fa1-11d2-883f-0016d3cca42{} is used",
            "signature nonce is used",
        ),
        ("expired: 2026-01-15T08:0{}:00Z is over", "expired: is over"),
        ("expired: 20260115T080{}00Z is over", "expired: is over"),
        ("wrong, server string to sign is:POST\n/\nnonce:{}", "wrong,"),
        (
            "<Connection object at 0x7f0{}a> failed:\n no route",
            "<Connection object> failed: no route",
        ),
    ],
)
def test_message_is_the_same_when_the_same_call_fails_again(text: str, message: str) -> None:
    """Each change of it is logged, published, and told each pod that waits."""
    for error in (Denied, Unknown):
        assert {str(error(text.format(number))) for number in (1, 2)} == {message}


def test_message_names_what_has_to_be_changed_and_is_bounded() -> None:
    """Names of groups, roles and instances stay."""
    text = (
        "group asg-2ze1f4 of role arn:aws:iam::123456789012:role/fenka-2026 has i-0abc123def4567890"
    )
    assert str(Denied(text)) == text
    assert len(str(Denied("x" * 5000))) == MAX_MESSAGE
