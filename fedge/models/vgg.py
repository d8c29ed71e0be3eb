"""VGG11 without batch normalisation.

K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
ICLR 2015 (configuration A).
"""

from collections import OrderedDict

from torch import nn

from fedge.models.seeded import check_widths, scaled, seeded

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOL_AFTER = (1, 2, 4, 6, 8)  # convolutions, counted from 1


def vgg11(outputs: int = 10, seed: int | None = None, width: float = 1.0) -> nn.Sequential:
    """VGG11's eight convolutions and a 512-512-512-out head for images [B, 3, 32, 32].

    No batch norm and no dropout, hence no running statistics. Convolutions start from Kaiming's
    normal distribution (fan_out, ReLU) with zero biases: torch's default shrinks the signal at every
    layer, and without normalisation the net then hardly trains. 9,750,922 parameters with 10
    outputs; `width` multiplies the channels and the hidden units.
    """
    check_widths(outputs=outputs)
    return seeded(lambda: _vgg11(outputs, scaled(WIDTHS, width), *scaled((512,), width)), seed)


def _vgg11(outputs: int, widths: tuple[int, ...], hidden: int) -> nn.Sequential:
    layers = _features(widths)
    layers.update(
        flatten=nn.Flatten(),
        fc1=nn.Linear(widths[-1], hidden),
        relu9=nn.ReLU(),
        fc2=nn.Linear(hidden, hidden),
        relu10=nn.ReLU(),
        fc3=nn.Linear(hidden, outputs),
    )
    return nn.Sequential(layers)


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
