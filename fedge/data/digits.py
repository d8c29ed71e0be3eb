"""Optical recognition of handwritten digits: 1,797 real 8x8 images, shipped with the library.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49 (CC BY 4.0).
"""

from importlib import resources

import numpy as np
import torch
from torch import Tensor

from fedge.data.base import Data

LARGEST_PIXEL = 16


def load_digits() -> Data:
    """Load the digits: 1,437 train and 360 test images [1, 8, 8] in [0, 1], ten classes.

    >>> load_digits()
    Data(train=1437, test=360, shape=(1, 8, 8), classes=10)
    """
    with (
        resources.files("fedge.data").joinpath("digits.npz").open("rb") as file,
        np.load(file) as stored,
    ):
        stored_tensors = {name: torch.from_numpy(stored[name]) for name in stored.files}
    return Data(
        train_x=_images(stored_tensors["train_x"]),
        train_y=stored_tensors["train_y"].long(),
        test_x=_images(stored_tensors["test_x"]),
        test_y=stored_tensors["test_y"].long(),
        classes=10,
        names=tuple("0123456789"),
    )


def _images(pixels: Tensor) -> Tensor:
    return (pixels.to(torch.float32) / LARGEST_PIXEL).reshape(-1, 1, 8, 8)
