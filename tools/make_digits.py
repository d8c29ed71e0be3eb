"""Make fedge/data/digits.npz from scikit-learn's copy of the UCI digits.

    python tools/make_digits.py

The split is fixed and stratified: 1,437 train and 360 test images. Needs scikit-learn.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TARGET = Path(__file__).parents[1] / "fedge" / "data" / "digits.npz"


def main() -> None:
    """Split, check that bytes lose nothing, and write."""
    pixels, labels = load_digits(return_X_y=True)
    as_bytes = pixels.astype(np.uint8)
    if not np.array_equal(as_bytes, pixels) or as_bytes.max() > 16:
        raise ValueError("pixels must be whole numbers from 0 to 16: is this the UCI digits set?")
    train_x, test_x, train_y, test_y = train_test_split(
        as_bytes, labels.astype(np.uint8), test_size=360, stratify=labels, random_state=0
    )
    np.savez_compressed(TARGET, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
    print(f"{TARGET.name}: {len(train_y)} train, {len(test_y)} test, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
