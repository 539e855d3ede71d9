"""The tokens of a node."""

from pathlib import Path

from fenka.node.lease.store import LeaseStore


def test_tokens_that_are_read_stay_as_they_are_while_threads_store_others(tmp_path: Path) -> None:
    """A hundred containers that start together store theirs while a pass reads all tokens."""
    store = LeaseStore(tmp_path)
    first = store.issue("aliyun.com/gpu-mem", ["0"])
    reading = iter(store.tokens.values())
    second = store.issue("aliyun.com/gpu-mem", ["1"])
    assert list(reading) == [first]
    reading = iter(store.tokens.values())
    store.drop(first.name)
    assert list(reading) == [first, second]
    assert list(store.tokens) == [second.name]
    # All of it is on disk.
    again = LeaseStore(tmp_path)
    assert again.load() == []
    assert again.tokens == store.tokens
