"""Links that run client work: the vectorised simulator, alone or on several ranks, and the loop-back reference."""

from fedge.engine.clients.worker import ClientError
from fedge.engine.links.base_link import Around, BaseLink
from fedge.engine.links.loopback import Loopback
from fedge.engine.ranks.process_group import Group, RankError, RankLost, joined
from fedge.engine.ranks.ranks import Ranks
from fedge.engine.settings import Engine
from fedge.engine.simulator import Simulator
from fedge.engine.uploads.checks import TooFewReplies
from fedge.ledger import Ledger, Row

__all__ = [
    "Around",
    "BaseLink",
    "ClientError",
    "Engine",
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
