"""Records of the ledger: two jobs of one name, another team, time that nobody held, an elastic node."""

from fenka.core.metering import HOUR_US, Amounts, LineKind
from fenka.history.series import Holder, UsageRecord

DAY = 20_758
"""2026-11-01."""
T4, A10 = "Tesla T4", "NVIDIA A10"
PRICES = {T4: 350_000, A10: 1_250_000}
ANNA = Holder("j1", "train", "anna", 1000, "vision", "anna", "training", "gang of 2: 4")
ANNA_AGAIN = Holder("j2", "train", "anna", 1000, "vision", "anna", "run", "2 x 4, 30% soft")
BEN = Holder("j3", 'a "b", c', "ben", 1001, "audio", "ben", "notebook", "8")
GIB_HOUR = 1024 * HOUR_US


def held(holder: Holder, hours: int, day: int = DAY, model: str = T4) -> UsageRecord:
    """So many hours of a whole card, with 12 GiB held and 3 GiB used, half of the time busy."""
    amounts = Amounts(
        *(hours * HOUR_US, 12 * hours * GIB_HOUR, 0),
        *(3 * hours * GIB_HOUR, 12 * hours * GIB_HOUR),
        *(hours * HOUR_US // 2, hours * HOUR_US),
    )
    return UsageRecord(day, LineKind.HELD, holder, "", model, None, amounts)


def unheld(kind: LineKind, card_us: int, day: int = DAY) -> UsageRecord:
    """Time of a T4 that nobody held."""
    return UsageRecord(day, kind, Holder(""), "", T4, None, Amounts(card_us))


RECORDS = [
    held(ANNA, 3),
    held(ANNA, 24, DAY + 1),
    held(ANNA_AGAIN, 2),
    held(BEN, 8),
    held(BEN, 1, DAY + 29, A10),
    unheld(LineKind.IDLE, 11 * HOUR_US - 1),
    unheld(LineKind.UNOBSERVED, 1),
    UsageRecord(DAY, LineKind.HELD, BEN, "i-0abc", A10, 432_100, Amounts(HOUR_US // 3)),
]
