"""Links that run client work: the vectorised simulator and the loop-back reference."""

from fedge.engine.ledger import Ledger, Row
from fedge.engine.loopback import Loopback
from fedge.engine.replies import TooFewReplies
from fedge.engine.simulator import Simulator
from fedge.engine.worker import ClientError

__all__ = ["ClientError", "Ledger", "Loopback", "Row", "Simulator", "TooFewReplies"]
