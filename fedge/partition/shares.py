"""Random shares of clients, turned into whole numbers of examples."""

import numpy as np
from numpy.typing import NDArray

MOST_DRAWS = 1000
MOST_NUMBERS = 10**8  # caps the wait before the error when there are very many clients


def draw_counts(
    totals: NDArray[np.int64],
    clients: int,
    alpha: float,
    min_examples: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Cut each total by its own Dir(alpha) over clients: [len(totals), clients].

    All shares are drawn again until every client has `min_examples` in sum over the totals.
    """
    numbers = len(totals) * clients
    draws = max(10, min(MOST_DRAWS, MOST_NUMBERS // numbers))
    largest = 0
    for _ in range(draws):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(totals))
        counts = round_shares(shares, totals)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_examples:
            return counts
        largest = max(largest, smallest)
    raise ValueError(
        f"in {draws} draws with alpha={alpha} and {clients} clients the smallest client never had "
        f"more than {largest} examples, min_examples is {min_examples}: "
        "raise alpha, use fewer clients, or lower min_examples"
    )


def round_shares(shares: NDArray[np.float64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round shares [T, K] of totals [T] to whole numbers whose rows sum to the totals.

    Cumulated shares are rounded, so each count is off by less than one.

    >>> round_shares(np.array([[0.5, 0.25, 0.25]]), np.array([10]))
    array([[5, 3, 2]])
    """
    ends = np.rint(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    ends = np.minimum(ends, totals[:, None])  # a cumulated sum may round above 1
    ends[:, -1] = totals
    return np.diff(ends, axis=1, prepend=0)
