"""The models of the experiments: plain functional modules without running statistics."""

from collections.abc import Callable

from torch import nn

from fedge.models.batch_norm import without_batch_norm
from fedge.models.cnn import fmnist_cnn, kws_cnn
from fedge.models.linear import logistic
from fedge.models.lora import lora, merged
from fedge.models.mlp import mlp
from fedge.models.vgg import vgg11

MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "fmnist_cnn": fmnist_cnn,
    "kws_cnn": kws_cnn,
    "logistic": logistic,
    "mlp": mlp,
    "vgg11": vgg11,
}

__all__ = ["MODELS", "fmnist_cnn", "kws_cnn", "logistic", "lora", "merged", "mlp", "vgg11", "without_batch_norm"]
