"""VGG11 without batch normalisation.

K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
ICLR 2015 (configuration A).
"""

from collections import OrderedDict

from torch import nn

from fedge.models.seeded import check_widths, scaled, seeded

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
INITS = ("he", "torch")
POOL_AFTER = (1, 2, 4, 6, 8)  # convolutions, counted from 1


def vgg11(
    outputs: int = 10, seed: int | None = None, width: float = 1.0, init: str = "he", dropout: float = 0.0
) -> nn.Sequential:
    """VGG11's eight convolutions and a 512-512-512-out head for images [B, 3, 32, 32].

    No batch norm, hence no running statistics. `dropout` is that of the head's two hidden layers: Simonyan and
    Zisserman have 0.5, here it is 0 unless asked for, since the federated paper names none. The first weights are
    He's, var(w) = 2 / fan before a ReLU (fan_out for convolutions, fan_in in the head) and 1 / fan_in before the
    outputs, with zero biases: torch's default shrinks the signal at every layer, and without normalisation the net
    then stands still for hundreds of steps. `init="torch"` leaves torch's default to the head. 9,750,922 parameters
    with 10 outputs; `width` multiplies the channels and the hidden units.
    """
    check_widths(outputs=outputs)
    if init not in INITS:
        raise ValueError(f"init is {init!r}, it must be one of {', '.join(INITS)}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, it must be at least 0 and below 1 (0.5 drops half of the units)")
    (hidden,) = scaled((512,), width)
    return seeded(lambda: _vgg11(outputs, scaled(WIDTHS, width), hidden, init == "he", dropout), seed)


def _vgg11(outputs: int, widths: tuple[int, ...], hidden: int, he: bool, dropout: float) -> nn.Sequential:
    layers = _features(widths)
    layers["flatten"] = nn.Flatten()
    for at, before in ((1, widths[-1]), (2, hidden)):
        layers[f"fc{at}"] = _linear(before, hidden, 2.0 if he else None)
        layers[f"relu{8 + at}"] = nn.ReLU()
        if dropout:
            layers[f"drop{at}"] = nn.Dropout(dropout)
    layers["fc3"] = _linear(hidden, outputs, 1.0 if he else None)
    return nn.Sequential(layers)


def _linear(before: int, after: int, gain: float | None) -> nn.Linear:
    """var(w) = gain / before; None: torch's own."""
    layer = nn.Linear(before, after)
    if gain is not None:
        nn.init.normal_(layer.weight, 0.0, (gain / before) ** 0.5)
        nn.init.zeros_(layer.bias)
    return layer


def _features(widths: tuple[int, ...]) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = (3, *widths[:-1])
    for i, (before, after) in enumerate(zip(inputs, widths, strict=True), start=1):
        layers[f"conv{i}"] = _conv(before, after)
        layers[f"relu{i}"] = nn.ReLU()
        if i in POOL_AFTER:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    return layers


def _conv(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, kernel_size=3, padding=1)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
