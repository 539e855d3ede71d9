"""The routing table's file: which tables are refused, and how metrics call a replica."""

import json

import pytest

from fenka.jobs.routing_table import InvalidTable, ListenAddress, decode, replica_label


def row(**changes: object) -> bytes:
    """Return a table with one version and one replica, changed as given."""
    replica = {"host": "10.0.0.1", "ports": {"http": 80}}
    fields = {"name": "v1", "weight": 1, "replicas": [replica], **changes}
    return json.dumps({"format": "fenka.gateway/1", "service": "s", "versions": [fields]}).encode()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (row(weight=-1), "Expected `int` >= 0"),
        (row(name="../v"), "invalid name '../v'"),
        (row(extra=1), "unknown field `extra`"),
        (b'{"\xff":1}', "invalid: 'utf-8' codec can't decode byte 0xff"),
        (row(replicas=[{"host": "example.com", "ports": {}}]), "invalid replica 'example.com'"),
        (row(replicas=[{"host": "::1", "ports": {"http": 0}}]), "Expected `int` >= 1"),
        (row(replicas=[{"host": "::1", "ports": {"http": 1}}] * 2), "a replica appears twice"),
    ],
)
def test_invalid_table_is_refused(text: bytes, sentence: str) -> None:
    """Each mistake in a table is named."""
    decode(row())
    with pytest.raises(InvalidTable) as error:
        decode(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("ports", "label"),
    [
        ({"http": "/s"}, "/s"),
        ({"http": 2, "grpc": 3}, "10.0.0.1:3"),
        ({}, "10.0.0.1:0"),
    ],
)
def test_replica_is_called_by_its_first_address(
    ports: dict[str, ListenAddress], label: str
) -> None:
    """By the order of the ports' names."""
    assert replica_label("10.0.0.1", ports) == label
