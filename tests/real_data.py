"""The loaders on the real files: `make test-data`, apart from the main suite. What is not there is a failure.

FEDGE_DATA/  fashion_mnist (or Debian's package), cifar10, kws_mfcc_50x16.npz, speech_commands_sample.zip
             (clips of Speech Commands v0.01 in the official folders)
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

import fedge
from fedge.data.features import read_features
from fedge.data.places import home
from fedge.data.speech_commands import PREPARED, WORDS, find, from_audio

pytestmark = pytest.mark.data
SAMPLE, CLIPS = "speech_commands_sample.zip", 300


def test_fashion_mnist() -> None:
    data = fedge.data.load("fashion_mnist")
    assert (data.train_x.shape, data.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert data.train_y.bincount().tolist() == [6000] * 10
    assert abs(float(data.train_x.mean()) - 0.2860) < 1e-4
    assert abs(float(data.train_x.std()) - 0.3530) < 1e-4


def test_cifar10() -> None:
    data = fedge.data.load("cifar10")
    assert (data.train_x.shape, data.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert data.train_y.bincount().tolist() == [5000] * 10
    means = data.train_x.mean((0, 2, 3)).tolist()
    assert np.allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)


def test_key_words() -> None:
    data = fedge.data.load("speech_commands")
    assert (data.train_x.shape, data.test_x.shape) == ((20_000, 1, 50, 16), (1_452, 1, 50, 16))
    assert data.names == WORDS


def test_our_mfcc_is_that_of_the_prepared_features(tmp_path: Path) -> None:
    place = find()
    assert place.name == PREPARED, f"expected {PREPARED} in {home()}"
    with zipfile.ZipFile(home() / SAMPLE) as packed:
        packed.extractall(tmp_path)
    ours, prepared = from_audio(tmp_path), read_features(place)
    where = {clip: at for at, clip in enumerate(prepared.clip)}
    theirs = prepared.mfcc[[where[clip] for clip in ours.clip]]
    assert len(ours.clip) >= CLIPS
    assert np.abs(ours.mfcc - theirs).max() < 0.05
