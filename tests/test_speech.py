"""Key words: WAV files, their MFCCs against a plain computation, prepared features, the cache."""

from __future__ import annotations

import os
import random
import sys
import zipfile
from pathlib import Path

import librosa
import numpy as np
import pytest
import scipy.fft

from fedge.data import DataError, speech_commands
from fedge.data.features import Features, read_features, write_features
from fedge.data.mfcc import mfcc, samples
from fedge.data.split import hold_out, stratified
from fedge.experiment.setup import deal

from . import official, real_data


def words(folder: Path, clips: int = 2) -> Path:
    """The official folders with a few clips each; the last of every word is too short."""
    for at, word in enumerate(speech_commands.WORDS):
        (folder / word).mkdir(parents=True)
        for clip in range(clips):
            (folder / word / f"{clip:08x}_nohash_0.wav").write_bytes(official.wav(seed=10 * clip + at))
        (folder / word / "ffffffff_nohash_0.wav").write_bytes(official.wav(12_000))
    return folder


def plain_mfcc(clip: np.ndarray) -> np.ndarray:
    """The definition, frame by frame in float64."""
    signal = np.concatenate([clip.astype(np.float64), np.zeros(192)])
    window = np.zeros(512)
    window[56:456] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)  # in the middle of the FFT's 512
    frames = np.stack([signal[start : start + 512] * window for start in range(0, 320 * 50, 320)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    mel = power @ librosa.filters.mel(sr=16_000, n_fft=512, n_mels=40, dtype=np.float64).T
    decibels = 10 * np.log10(np.maximum(mel, 1e-10))
    decibels = np.maximum(decibels, decibels.max() - 80)
    return scipy.fft.dct(decibels, type=2, norm="ortho", axis=1)[:, :16]


def test_mfcc_is_what_it_says() -> None:
    clips = [samples("x", official.wav(seed=seed)) for seed in range(3)]
    found = mfcc(clip for clip in clips if clip is not None)
    assert found.shape == (3, 50, 16)
    for clip, one in zip(clips, found, strict=True):
        assert clip is not None
        assert np.abs(one - plain_mfcc(clip)).max() < 0.01


def test_the_check_of_the_real_files_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-data` on a few clips of our own; without the files it fails."""
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path))
    monkeypatch.setattr(real_data, "CLIPS", 20)
    for check in (real_data.test_cifar10, real_data.test_key_words):
        with pytest.raises(DataError, match="is not on this machine"):
            check()
    with zipfile.ZipFile(tmp_path / real_data.SAMPLE, "w") as packed:
        for path in words(tmp_path / "official").rglob("*.wav"):
            packed.write(path, path.relative_to(tmp_path / "official"))
    write_features(tmp_path / speech_commands.PREPARED, speech_commands.from_audio(tmp_path / "official"))
    real_data.test_our_mfcc_is_that_of_the_prepared_features(tmp_path / "unpacked")


def test_without_librosa_audio_says_what_to_install_and_features_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_features(tmp_path / "kws_mfcc_50x16.npz", some_features())
    for name in ("librosa", "pooch", "scipy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(read_features(speech_commands.find(tmp_path)).label) == 40
    with pytest.raises(DataError, match=r"need librosa: pip install 'fedge\[audio\]'"):
        mfcc([np.zeros(16_000, np.float32)])


def test_silence_has_features_too() -> None:
    assert np.isfinite(mfcc([np.zeros(16_000, np.float32)])).all()


def test_short_clips_are_left_out_and_odd_ones_refused() -> None:
    assert samples("x", official.wav(15_999)) is None
    one = samples("x", official.wav())
    assert one is not None
    assert len(one) == 16_000
    for content, message in [
        (official.wav(rate=8_000), "1 channels of 16 bits at 8000 Hz"),
        (official.wav(channels=2), "2 channels"),
        (official.wav()[:-100], "15950 samples, its header says 16000"),
        (b"RIFF", r"no WAV file \(it ends early\)"),
        (b"not audio at all, only text", "no WAV file"),
    ]:
        with pytest.raises(DataError, match=f"x .*{message}"):
            samples("x", content)


def test_folders_and_archive_give_the_same_features(tmp_path: Path) -> None:
    folder = words(tmp_path / "audio")
    inside = {f"./{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.wav")}
    packed = official.archive(tmp_path / "speech_commands_v0.01.tar.gz", inside | {"./six/a.wav": official.wav()})
    one, other = speech_commands.from_audio(folder), speech_commands.from_audio(packed)
    assert one.clip == other.clip
    assert np.array_equal(one.mfcc, other.mfcc)
    assert one.label.tolist() == [at for at in range(10) for _ in range(2)]
    assert one.clip[:2] == ("one/00000000_nohash_0.wav", "one/00000001_nohash_0.wav")


def test_features_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "data"))
    folder = words(tmp_path / "audio")
    assert speech_commands.find(folder) == folder
    first = speech_commands.features(folder, 20)
    assert np.abs(first.mfcc - speech_commands.from_audio(folder).mfcc).max() < 0.05
    monkeypatch.setattr(speech_commands, "from_audio", lambda place: pytest.fail("computed again"))
    assert np.array_equal(speech_commands.features(folder, 20).mfcc, first.mfcc)
    (folder / "one" / "00000000_nohash_0.wav").write_bytes(official.wav(seed=99))
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        speech_commands.features(folder, 20)


def test_incomplete_audio_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "data"))
    folder = words(tmp_path / "audio")
    with pytest.raises(DataError, match=r"20 clips of one second, Speech Commands v0\.01 has 21,452"):
        speech_commands.load_speech_commands(folder)
    for path in (folder / "go").iterdir():
        path.unlink()
    (folder / "go").rmdir()
    with pytest.raises(DataError, match="has no folder go"):
        speech_commands.from_audio(folder)


def test_an_archive_is_checked_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "data"))
    packed = official.archive(tmp_path / "speech_commands_v0.01.tar.gz", {"one/a.wav": official.wav()})
    with pytest.raises(DataError, match="truncated or not the official file: sha256"):
        speech_commands.load_speech_commands(packed)


def some_features(count: int = 40) -> Features:
    draw = np.random.default_rng(0)
    values = (draw.standard_normal((count, 50, 16)) * np.linspace(300, 5, 16)).astype(np.float32)
    clips = tuple(f"{speech_commands.WORDS[at % 10]}/{at % 40:08x}_nohash_{at // 40}.wav" for at in range(count))
    return Features(values, np.arange(count) % 10, clips, speech_commands.WORDS)


def test_prepared_features_read_back(tmp_path: Path) -> None:
    wanted = some_features()
    write_features(tmp_path / "kws_mfcc_50x16.npz", wanted)
    found = read_features(speech_commands.find(tmp_path))
    assert (found.clip, found.classes, found.label.tolist()) == (wanted.clip, wanted.classes, wanted.label.tolist())
    step = (wanted.mfcc.max((0, 1)) - wanted.mfcc.min((0, 1))) / 65534
    assert (np.abs(found.mfcc - wanted.mfcc).max((0, 1)) <= 0.51 * step).all()


def test_the_split_is_standardised_by_its_training_part() -> None:
    data = speech_commands.split(some_features(200), 50)
    assert (len(data.train_x), len(data.test_x)) == (150, 50)
    assert data.test_y.bincount().tolist() == [5] * 10
    flat = data.train_x.reshape(-1, 16)
    assert flat.mean(0).abs().max() < 1e-4
    assert (flat.std(0) - 1).abs().max() < 1e-3


def test_speakers_own_their_clips_and_become_clients() -> None:
    found = some_features(200)
    data = speech_commands.split(found, 50)
    of_clip = [clip.split("/")[1].split("_")[0] for clip in found.clip]
    kept = stratified(found.label, 50)
    assert data.owners == tuple(one for one, tested in zip(of_clip, kept, strict=True) if not tested)
    held = hold_out(data, 0.2)
    assert len(held.owners) == len(held.train_y) == 120
    where = deal({"kind": "by_group"}, data)
    assert where.names == tuple(sorted(set(data.owners)))
    assert {data.owners[i] for i in where.examples(1).tolist()} == {where.names[1]}


def test_damaged_features_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kws_mfcc_50x16.npz"
    write_features(path, some_features())
    whole = path.read_bytes()
    for content in (whole[:-40], whole[: len(whole) // 2], b"", b"PK\x03\x04 no zip"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="truncated or damaged"):
            read_features(path)
    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 0xFF
    path.write_bytes(changed)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_features(path)


def test_features_damaged_anywhere_are_features_or_one_error(tmp_path: Path) -> None:
    path, draw = tmp_path / "kws_mfcc_50x16.npz", random.Random(9)
    write_features(path, some_features(20))
    whole = path.read_bytes()
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3, 30])):
            changed[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            read_features(path)
        except DataError as error:
            refused += str(path) in str(error)
    assert refused > 350


def test_features_that_unpack_to_gigabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "kws_mfcc_50x16.npz"
    write_features(path, some_features(20))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("more.npy", "w") as more:
        for _ in range(257):
            more.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="unpacks to 257 MiB, no file of prepared features has more than 256"):
        read_features(path)


def test_features_in_the_place_of_a_file_of_the_user(tmp_path: Path) -> None:
    """A link to it where the cache is written, or a device where it is read."""
    path, mine = tmp_path / "kws_mfcc_50x16.npz", tmp_path / "mine.txt"
    mine.write_text("precious")
    for name in (path.name, f".{path.name}.part", f".{path.name}.tmp"):
        (tmp_path / name).symlink_to(mine)
    write_features(path, some_features(20))
    assert mine.read_text() == "precious"
    assert len(read_features(path).label) == 20
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is no file but a pipe or a device"):
        read_features(path)
    path.unlink()
    path.write_bytes(b"")
    os.truncate(path, 200 << 30)  # takes no room
    with pytest.raises(DataError, match="it has 214748364800 bytes, and 268435456 are read at most"):
        read_features(path)


def test_a_clip_without_end_is_refused(tmp_path: Path) -> None:
    clip = words(tmp_path) / "one" / "00000000_nohash_0.wav"
    os.truncate(clip, 100 << 30)  # takes no room
    with pytest.raises(
        DataError, match=r"cannot read .*one/00000000_nohash_0.wav: it has 107374182400 bytes, and 1048576 are"
    ):
        speech_commands.from_audio(tmp_path)
    clip.unlink()
    clip.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="it is no file but a pipe or a device"):
        speech_commands.from_audio(tmp_path)


@pytest.mark.parametrize("name", ["clip", "classes"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kws_mfcc_50x16.npz"
    write_features(path, some_features(20))
    with np.load(path) as stored:
        parts = dict(stored)
    parts[name][-1] = parts[name][-1][:2] + b"\xff"
    np.savez(path, **parts)
    with pytest.raises(DataError, match="no plain text"):
        read_features(path)


def test_features_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    right = {
        "mfcc": np.zeros((2, 50, 16), np.int16),
        "scale": np.ones(16, np.float32),
        "mean": np.ones(16, np.float32),
        "label": np.array([0, 9], np.uint8),
        "clip": np.array([b"one/a.wav", b"go/b.wav"]),
        "classes": np.array([word.encode() for word in speech_commands.WORDS]),
    }
    np.savez(path, **right)
    assert len(read_features(path).label) == 2
    for name, wrong, message in [
        ("mfcc", np.zeros((2, 49, 16), np.int16), r"mfcc has shape \(2, 49, 16\)"),
        ("mfcc", np.zeros((2, 50, 16)), "mfcc has dtype float64"),
        ("label", np.array([0, 10], np.uint8), "label 10 has no word"),
        ("label", np.array([0, 1], np.uint8), "clip go/b.wav is labelled 'two'"),
        ("label", np.array(0, np.uint8), "expected one number a clip"),
        ("clip", np.array([b"one/a.wav", b"one/a.wav"]), "1 clips are there more than once"),
        ("scale", np.zeros(16, np.float32), "scale has values that are not positive and finite"),
        ("mean", np.full(16, np.nan, np.float32), "mean has values that are not finite"),
        ("scale", None, "no file of prepared features: .*scale"),
    ]:
        np.savez(path, **{key: value for key, value in (right | {name: wrong}).items() if value is not None})
        with pytest.raises(DataError, match=message):
            read_features(path)
