"""Mel-frequency cepstral coefficients of one-second clips: 50 frames of 16, as the paper's key words need them.

400-sample Hann window in a 512-point FFT, hop 320, no centring, 192 zeros after the clip, 40 mel bands, power in dB (at
most 80 below the clip's loudest), orthonormal DCT-II, the first 16 coefficients.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fedge.data.errors import DataError
from fedge.data.files import AGAIN

RATE = 16_000
SECOND = RATE  # samples of a clip
MOST = 1 << 20  # bytes of a WAV file; one second has 32,044
TAIL = 192  # zeros, so that 50 frames fit
TOGETHER = 256  # clips at a time


def samples(where: object, content: bytes) -> NDArray[np.float32] | None:
    """A WAV file as numbers in [-1, 1); None if it is not one second long."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            kind = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            count, raw = file.getnframes(), file.readframes(file.getnframes())
    except EOFError:
        raise DataError(f"{where} is no WAV file (it ends early): {AGAIN}") from None
    except Exception as error:  # the standard library's reader of WAV raises many kinds on damaged bytes
        raise DataError(f"{where} is no WAV file ({error or type(error).__name__}): {AGAIN}") from None
    if kind != (1, 2, RATE):
        raise DataError(f"{where} has {kind[0]} channels of {8 * kind[1]} bits at {kind[2]} Hz, expected 1, 16, {RATE}")
    if len(raw) != 2 * count:
        raise DataError(f"{where} has {len(raw) // 2} samples, its header says {count}: {AGAIN}")
    return np.frombuffer(raw, "<i2").astype(np.float32) / np.float32(32768) if count == SECOND else None


def mfcc(clips: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Clips of one second -> [N, 50, 16] in dB."""
    stream = iter(clips)
    parts = [_some(np.stack(some)) for some in _groups(stream)]
    return np.concatenate(parts) if parts else np.zeros((0, 50, 16), np.float32)


def _groups(stream: Iterator[NDArray[np.float32]]) -> Iterator[list[NDArray[np.float32]]]:
    while some := list(islice(stream, TOGETHER)):
        yield some


def _some(clips: NDArray[np.float32]) -> NDArray[np.float32]:
    try:
        import librosa
    except ImportError:
        raise DataError("MFCCs of audio need librosa: pip install 'fedge[audio]', or use prepared features") from None
    power = librosa.feature.melspectrogram(
        y=np.pad(clips, ((0, 0), (0, TAIL))),
        sr=RATE,
        n_fft=512,
        hop_length=320,
        win_length=400,
        window="hann",
        center=False,
        n_mels=40,
        power=2.0,
    )
    decibels = np.stack([librosa.power_to_db(clip, top_db=80.0) for clip in power])  # [N, 40, 50]
    found = librosa.feature.mfcc(S=decibels, n_mfcc=16, dct_type=2, norm="ortho")  # [N, 16, 50]
    return np.ascontiguousarray(found.transpose(0, 2, 1), dtype=np.float32)
