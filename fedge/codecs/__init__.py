"""How uploads travel: one file per codec."""

from fedge.codecs.cast import Cast
from fedge.codecs.quantise import Quantise
from fedge.codecs.top_k import TopK

__all__ = ["Cast", "Quantise", "TopK"]
