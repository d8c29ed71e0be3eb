"""What happens in a drill, round by round, and what it explains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedge.attacks.attack import KINDS

LOST = r"no answer within|Flower says|was not accepted"  # an answer that did not arrive
HELD = r"does not hold"  # what follows from one
AWAY = rf"{LOST}|{HELD}|not connected|has not yet said|did not say who it is|is left out"

REASONS = {
    "nan": "is not finite",
    "shape": r"has shape \[1, \d+\], not",
    "garbage": "cannot be read",
    "raises": r"step \d+: ZeroDivisionError: a sensor gave nothing",
    "escapes": r"step \d+: ZeroDivisionError: \[2J \[31mowned",
    "hangs": "took longer than|no answer within",
    "dies": "no answer within|ClientApp stopped responding",
    "ended": r"was told to end \(SIGTERM\)",
    "huge": r"its largest number is 1e\+30, over 1000 times the usual",
    "weight": r"weight 100000 is not in \(0, \d+\], the most that this client may weigh",
    "bomb": r"the answer has 4000\d{6} bytes once unpacked, at most \d+ are expected: it was not read",
    "malformed": "the message cannot be read: KeyError: 'arraychunk_ids'",
    "impostor": "its node is client 0 now",
}
# Of fedge.attacks: lies that no check can see; not those that need all uploads to know how long they may be.
COUNTS = tuple(name for name, kind in KINDS.items() if not kind.climbs)


@dataclass(frozen=True)
class Plan:
    """Which fault comes in which round."""

    clients: int
    rounds: int
    deadline: float
    limit: float  # seconds for all of it
    devices: dict[int, dict[int, str]]  # round: client: fault
    node: tuple[int, int]  # round, client: its node is killed
    server_round: int
    link_rounds: tuple[int, ...] = ()  # the SuperLink is killed while devices work
    push_rounds: tuple[int, ...] = ()  # ... and while it takes messages
    heavy: int | None = None  # a client that joins with a million examples
    away: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # client: rounds in which it may be away, and why not

    def faults(self) -> Iterator[tuple[int, int, str]]:
        for number, clients in self.devices.items():
            for client, fault in clients.items():
                yield number, client, fault

    @property
    def impostors(self) -> dict[int, int]:
        """Client: the round in which it first says that it is client 0."""
        return {client: number for number, client, fault in self.faults() if fault == "impostor"}

    def absent(self, number: int, client: int) -> bool:
        """Whether a client may be away in this round, for what happened to it before."""
        first, last = self.away.get(client, (0, -1))
        return first < number <= last


FULL = Plan(
    clients=6,
    rounds=17,
    deadline=40.0,
    limit=25 * 60,
    devices={
        3: {2: "nan", 3: "garbage"},
        4: {3: "shape", 4: "raises", 5: "escapes"},
        5: {2: "huge", 4: "weight", 5: "scaled"},
        6: {0: "bomb", 4: "sign_flip", 5: "malformed"},
        7: {1: "hangs"},
        8: {3: "impostor", 5: "weight_liar"},
        9: {1: "constant", 5: "free_rider"},
        10: {2: "dies", 4: "ended"},
        11: {0: "label_flip", 1: "little", 5: "backdoor"},
    },
    heavy=5,
    node=(2, 1),
    push_rounds=(12, 13),
    link_rounds=(14,),
    server_round=15,
    away={1: (2, 6), 2: (10, 14), 3: (8, 14)},
)
SHORT = Plan(
    clients=4,
    rounds=6,
    deadline=25.0,
    limit=420,
    devices={
        1: {1: "weight", 2: "sign_flip"},
        2: {2: "bomb", 3: "malformed"},
        3: {0: "huge", 1: "escapes"},
        4: {0: "scaled", 3: "impostor"},
        5: {2: "dies"},
    },
    server_round=3,
    push_rounds=(4,),
    node=(6, 1),
    away={2: (5, 6), 3: (4, 6)},
)


def unexplained(records: list[dict[str, Any]], plan: Plan = FULL) -> list[tuple[int, dict[str, Any]]]:
    """Dropped answers, by round, that no fault of the drill accounts for.

    A planned fault costs its own client; one that was killed, died or lied about its name may be away for a while; and
    a killed SuperLink may lose what is under way: one answer per client, in that round alone, and what follows from it.
    """
    found = []
    for record in records:
        number, seen = record["round"], set[int]()
        for drop in record["dropped"]:
            client, reason = drop["client"], drop["reason"]
            own = client in plan.devices.get(number, {}) or (number, client) == plan.node
            away = plan.absent(number, client) and re.search(AWAY, reason)
            killed = number in plan.link_rounds + plan.push_rounds
            lost = killed and re.search(f"{HELD}|is left out" if client in seen else LOST, reason)
            seen.add(client)
            if not (own or away or lost):
                found.append((number, drop))
    return found


def unnamed(records: dict[int, dict[str, Any]], plan: Plan) -> list[str]:
    """Faults that the record does not name."""
    wrong = []
    number, client = plan.node
    expected = [(number, client, r"no answer within|Flower says")]
    expected += [(number, client, REASONS[fault]) for number, client, fault in plan.faults() if fault in REASONS]
    for number, client, reason in expected:
        if not any(d["client"] == client and re.search(reason, d["reason"]) for d in records[number]["dropped"]):
            wrong.append(f"round {number} does not name client {client}, {reason}: {records[number]['dropped']}")
    for client, number in plan.impostors.items():
        words = f"it says that it is client 0, but its key is client {client}'s: start it with partition-id={client}"
        drops = [drop for later in (1, 2) for drop in records[number + later]["dropped"]]
        if not any(drop["client"] == client and words in drop["reason"] for drop in drops):
            wrong.append(f"rounds {number + 1} and {number + 2} do not name the impostor {client}: {drops}")
    killed = [(number, "the SuperLink did not answer|had to be sent again") for number in plan.link_rounds]
    killed += [(number, "had to be sent again") for number in plan.push_rounds]
    for number, words in [*killed, (plan.server_round, "was started again")]:
        if not any(re.search(words, fault) for fault in records[number].get("faults", [])):
            wrong.append(f"round {number} does not say '{words}'")
    for number, record in records.items():
        for drop in record["dropped"]:
            if not drop["reason"].isprintable() or len(drop["reason"]) > 700:
                wrong.append(f"round {number} has what a device wrote: {drop['reason']!r}")
    return wrong
