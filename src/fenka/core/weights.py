"""How the weights of a service's versions divide its requests."""

from collections.abc import Collection, Mapping


def shares(weights: Mapping[str, int] | None, versions: Collection[str]) -> dict[str, int]:
    """Return the shares of versions, which add up to 100; nothing if none of them has a weight.

    Args:
        weights: The weights by version; None if all are equal.
        versions: The versions that there are.
    """
    known = {name: 1 if weights is None else weights.get(name, 0) for name in versions}
    total = sum(known.values())
    if not total:
        return {}
    parts = {name: 100 * weight // total for name, weight in known.items()}
    # The largest remainders get what is left of the sum.
    order = sorted(known, key=lambda name: (-(100 * known[name] % total), name))
    for name in order[: 100 - sum(parts.values())]:
        parts[name] += 1
    return parts
