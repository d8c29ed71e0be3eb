"""Links that run client work: the vectorised simulator, alone or on several ranks, and the loop-back reference."""

from fedge.engine.group import Group, RankError, RankLost, joined
from fedge.engine.ledger import Ledger, Row
from fedge.engine.loopback import Loopback
from fedge.engine.ranks import Ranks
from fedge.engine.replies import TooFewReplies
from fedge.engine.simulator import Simulator
from fedge.engine.worker import ClientError

__all__ = [
    "ClientError",
    "Group",
    "Ledger",
    "Loopback",
    "RankError",
    "RankLost",
    "Ranks",
    "Row",
    "Simulator",
    "TooFewReplies",
    "joined",
]
