"""Small convolutional networks for Fashion-MNIST and for key words."""

from collections import OrderedDict

from torch import nn

from fedge.models.seeded import check_widths, scaled, seeded


def fmnist_cnn(outputs: int = 10, seed: int | None = None, width: float = 1.0) -> nn.Sequential:
    """Two 5x5 convolutions and 512 hidden units for images [B, 1, 28, 28].

    821,706 parameters with 10 outputs; `width` multiplies the channels and the hidden units.
    """
    check_widths(outputs=outputs)
    return seeded(lambda: _fmnist_cnn(outputs, scaled((16, 32, 512), width)), seed)


def kws_cnn(outputs: int = 10, seed: int | None = None, width: float = 1.0) -> nn.Sequential:
    """Three 3x3 convolutions and 256 hidden units for MFCCs [B, 1, 50 frames, 16 coefficients].

    Pools halve the coefficient axis only. 1,664,522 parameters with 10 outputs; `width` multiplies the channels and
    the hidden units.
    """
    check_widths(outputs=outputs)
    return seeded(lambda: _kws_cnn(outputs, scaled((16, 32, 64, 256), width)), seed)


def _fmnist_cnn(outputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    one, two, hidden = widths
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, one, kernel_size=5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(one, two, kernel_size=5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(two * 7 * 7, hidden),
        relu3=nn.ReLU(),
        fc2=nn.Linear(hidden, outputs),
    )
    return nn.Sequential(layers)


def _kws_cnn(outputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    one, two, three, hidden = widths
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, one, kernel_size=3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d((1, 2)),
        conv2=nn.Conv2d(one, two, kernel_size=3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d((1, 2)),
        conv3=nn.Conv2d(two, three, kernel_size=3, padding=1),
        relu3=nn.ReLU(),
        pool3=nn.MaxPool2d((1, 2)),
        flatten=nn.Flatten(),
        fc1=nn.Linear(three * 50 * 2, hidden),
        relu4=nn.ReLU(),
        fc2=nn.Linear(hidden, outputs),
    )
    return nn.Sequential(layers)
