"""Small convolutional networks for Fashion-MNIST and for key words."""

from collections import OrderedDict

from torch import nn

from fedge.models.seeded import check_widths, seeded


def fmnist_cnn(outputs: int = 10, seed: int | None = None) -> nn.Sequential:
    """Two 5x5 convolutions and 512 hidden units for images [B, 1, 28, 28].

    821,706 parameters with 10 outputs.
    """
    check_widths(outputs=outputs)
    return seeded(lambda: _fmnist_cnn(outputs), seed)


def kws_cnn(outputs: int = 10, seed: int | None = None) -> nn.Sequential:
    """Three 3x3 convolutions and 256 hidden units for MFCCs [B, 1, 50 frames, 16 coefficients].

    Pools halve the coefficient axis only. 1,664,522 parameters with 10 outputs.
    """
    check_widths(outputs=outputs)
    return seeded(lambda: _kws_cnn(outputs), seed)


def _fmnist_cnn(outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, 16, kernel_size=5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, kernel_size=5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * 7 * 7, 512),
        relu3=nn.ReLU(),
        fc2=nn.Linear(512, outputs),
    )
    return nn.Sequential(layers)


def _kws_cnn(outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, 16, kernel_size=3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d((1, 2)),
        conv2=nn.Conv2d(16, 32, kernel_size=3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d((1, 2)),
        conv3=nn.Conv2d(32, 64, kernel_size=3, padding=1),
        relu3=nn.ReLU(),
        pool3=nn.MaxPool2d((1, 2)),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * 50 * 2, 256),
        relu4=nn.ReLU(),
        fc2=nn.Linear(256, outputs),
    )
    return nn.Sequential(layers)
