import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedge.keys import choose, fold, fold_tensor, keep_mask, normal, uniform

words = st.integers(min_value=-(2**31), max_value=2**31)


@given(st.integers(min_value=-(2**63), max_value=2**63 - 1), st.lists(words, min_size=1, max_size=4))
def test_plain_integers_and_tensors_agree(key: int, address: list[int]) -> None:
    tensors = fold_tensor(torch.tensor(key), *(torch.tensor(word) for word in address))
    assert int(tensors) == fold(key, *address)
    mixed = fold_tensor(key, *address[:-1], torch.tensor(address[-1]))
    assert int(mixed) == fold(key, *address)


def test_neighbouring_addresses_give_unrelated_bits() -> None:
    keys = fold_tensor(0, torch.arange(20_000))
    bits = (keys.unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 0.02
    flips = ((keys[1:] ^ keys[:-1]).unsqueeze(1) >> torch.arange(64)) & 1
    assert (flips.double().mean(0) - 0.5).abs().max() < 0.02
    assert fold(0, 1, 2) != fold(0, 2, 1)


@given(st.integers(1, 300), st.data())
def test_choose_gives_distinct_ids_in_range(population: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, population))
    chosen = choose(data.draw(words), population, count).tolist()
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < population


def test_choose_is_uniform_on_both_of_its_paths() -> None:
    for count in (3, 8):  # below and above half of ten
        hits = torch.zeros(10)
        for key in range(4000):
            hits[choose(fold(7, key), 10, count)] += 1
        expected = 4000 * count / 10
        assert (hits - expected).abs().max() < 5 * expected**0.5


@given(words, st.integers(1, 60))
def test_choosing_most_takes_those_with_the_smallest_keys(key: int, population: int) -> None:
    count = population // 2 + 1
    by_key = sorted(range(population), key=lambda one: fold(key, one))
    assert choose(key, population, count).tolist() == sorted(by_key[:count])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_mask_keeps_the_right_share(p: float) -> None:
    mask = keep_mask(torch.tensor(3), torch.Size([100, 200]), p, torch.device("cpu"))
    assert abs(float(mask.double().mean()) - (1 - p)) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_and_normal_numbers_are_what_they_say(dtype: torch.dtype) -> None:
    like = torch.zeros(400, 500, dtype=dtype)
    flat = uniform(torch.tensor(3), like)
    assert flat.dtype == dtype
    assert 0 <= float(flat.min()) < 1e-4
    assert 1 - 1e-4 < float(flat.max()) < 1
    assert stats.kstest(flat.flatten().numpy(), "uniform").pvalue > 1e-3
    drawn = normal(torch.tensor(3), like)
    assert drawn.dtype == dtype
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3
    other = normal(torch.tensor(4), like)
    assert abs(float((drawn * other).mean())) < 5 / like.numel() ** 0.5
    assert torch.equal(drawn, normal(3, like))


def test_normal_numbers_of_many_keys_at_once_are_those_of_each() -> None:
    like, addresses = torch.zeros(6, 5, 3), torch.arange(6)
    together = torch.func.vmap(normal, randomness="error")(addresses, like)
    assert all(torch.equal(together[i], normal(addresses[i], like[i])) for i in range(6))


def test_a_dict_of_tensors_is_drawn_with_a_key_per_tensor() -> None:
    like = {"a": torch.zeros(4, 3), "b": torch.zeros(12)}
    for draw in (normal, uniform):
        drawn = draw(torch.tensor(5), like)
        assert {name: leaf.shape for name, leaf in drawn.items()} == {name: leaf.shape for name, leaf in like.items()}
        assert not torch.equal(drawn["a"].flatten(), drawn["b"])
        assert torch.equal(drawn["b"], draw(fold_tensor(5, 1), like["b"]))


def test_keep_mask_of_a_shorter_batch_is_a_prefix() -> None:
    long = keep_mask(torch.tensor(3), torch.Size([9, 4]), 0.5, torch.device("cpu"))
    short = keep_mask(torch.tensor(3), torch.Size([5, 4]), 0.5, torch.device("cpu"))
    assert torch.equal(long[:5], short)
