"""Messages survive the way there and back, and hostile bytes cost no more than they weigh."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedge.engine.links import wire
from fedge.engine.links.message_link import Unreadable, parse
from fedge.engine.links.wire import MAGIC, TYPES, WireError, decode, encode

KEYS = st.one_of(st.text(max_size=5), st.integers(-(2**31) + 1, 2**31 - 1))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=9)
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(NESTS)
def test_plain_nests_come_back(nest) -> None:
    assert decode(encode(nest)) == nest


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 3)])
def test_tensors_come_back_to_the_bit(name: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(TYPES[name])
    message = {0: [({"part": {"w": tensor, "v": tensor.mT if len(shape) == 2 else tensor}}, torch.tensor(2.0))]}
    ((upload, weight),) = decode(encode(message))[0]
    assert upload["part"]["w"].dtype == tensor.dtype
    assert torch.equal(
        upload["part"]["w"].view(torch.uint8) if shape else upload["part"]["w"],
        tensor.view(torch.uint8) if shape else tensor,
    )
    assert upload["part"]["v"].shape == (tensor.mT if len(shape) == 2 else tensor).shape
    assert float(weight) == 2.0


def test_a_view_sends_what_it_shows() -> None:
    large = torch.zeros(1_000_000)
    assert len(encode({"a": large[:10]})) < 200


def headed(head: object, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + body


DEEP = b'{"l":[' * 100_000 + b"]}" * 100_000
HOSTILE = {
    "nothing": b"",
    "not ours": b"PK\x03\x04" + b"0" * 100,
    "a pickle": b"\x80\x04\x95" + b"0" * 100,
    "cut short": encode({"a": torch.zeros(10)})[:-3],
    "left over": encode({"a": torch.zeros(10)}) + b"more",
    "a head that is longer than the message": MAGIC + (2**31).to_bytes(4, "little") + b"{}",
    "no JSON": headed(b"{nope"),
    "no text": headed(b"\xff\xfe"),
    "very deep": headed(DEEP),
    "no description": headed([1, 2]),
    "an unknown kind": headed({"x": []}),
    "two kinds": headed({"l": [], "u": []}),
    "a list as a key": headed({"d": [[[1], 2]]}),
    "a key twice": headed({"d": [["a", 1], ["a", 2]]}),
    "true as a key": headed({"d": [[True, 1]]}),
    "an unknown type": headed({"t": ["complex64", 1]}, b"0" * 8),
    "a type that is none": headed({"t": [["float32"], 1]}, b"0" * 4),
    "a negative size": headed({"t": ["float32", -1, -1]}, b"0" * 4),
    "a fraction of a size": headed({"t": ["float32", 1.0]}, b"0" * 4),
    "more than there is": headed({"t": ["float64", 2**62, 2**62]}, b"0" * 64),
    "zero times a lot, many axes": headed({"t": ["float32", 0, *[2**62] * 40]}),
    "a huge number": headed(b"9" * 10_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_at_once(name: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(WireError):
        decode(HOSTILE[name])
    assert time.perf_counter() - begin < 2


def test_flipped_bits_give_a_message_or_an_error_and_nothing_else() -> None:
    """What was flipped among the numbers of a tensor is for the checks of values to find."""
    good, draw = encode({0: [({"delta": {"w": torch.ones(4, 5)}}, torch.tensor(3.0))]}), random.Random(0)
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        try:
            decode(bytes(bad))
        except WireError:
            continue


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(WireError, match="a set cannot travel"):
        encode({"a": {1, 2}})
    with pytest.raises(WireError, match="complex64"):
        encode(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(WireError, match="keys must be"):
        encode({(1, 2): 3})


def test_a_message_takes_the_memory_that_it_weighs() -> None:
    big = {"a": torch.zeros(2_000_000)}
    blob = encode(big)
    assert len(blob) < 8_000_200
    assert wire.decode(blob)["a"].untyped_storage().nbytes() == 8_000_000


def test_keys_whose_hashes_agree_are_refused_at_once() -> None:
    """Multiples of 2^61 - 1 all have the hash 0: a table of them takes quadratic time."""
    pairs = ",".join(f"[{k * (2**61 - 1)},1]" for k in range(1, 20_000))
    head = ('{"d":[' + pairs + "]}").encode()
    begin = time.perf_counter()
    with pytest.raises(wire.WireError, match="a key is no text or whole number"):
        wire.decode(wire.MAGIC + len(head).to_bytes(4, "little") + head)
    assert time.perf_counter() - begin < 1


def test_absurd_shapes_are_an_error_of_ours() -> None:
    head = ('{"t":["uint8",' + "9" * 4000 + "," + "9" * 4000 + "]}").encode()
    with pytest.raises(wire.WireError, match="no known type and shape"):
        wire.decode(wire.MAGIC + len(head).to_bytes(4, "little") + head)


def test_a_head_of_many_small_things_is_not_looked_at() -> None:
    """A megabyte of empty tensors takes a second to read, and a large model leaves room for many megabytes."""
    blob = encode({0: [({"delta": {str(n): torch.zeros(0) for n in range(1000)}}, torch.ones(()))]})
    with pytest.raises(Unreadable, match="cannot be read"):
        parse(blob, 1 << 30, 4000)
    assert set(parse(blob, 1 << 30, 1 << 16)) == {0}
