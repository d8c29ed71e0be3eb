"""How uploads travel: one file per codec."""

from fedge.codecs.cast import Cast
from fedge.codecs.quantise import Quantise
from fedge.codecs.top_k import TopK
from fedge.core import Codec

CODECS: dict[str, type[Codec]] = {"quantise": Quantise, "top_k": TopK, "cast": Cast}

__all__ = ["CODECS", "Cast", "Quantise", "TopK"]
