"""docs/results-settings.md: what every number was measured with, and how that was chosen."""

from __future__ import annotations

from fedge.sweep import Choices, Store

from . import measured
from .parity import parity
from .places import paper
from .runs import Runs
from .tuned import leaders, tuning

TEXT = """\
# Settings and hardware of the results

{note} [The results](results.md) themselves are on their own page.

The runs are those of `fedge reproduce NAME --dataset fmnist|cifar10|kws` with the files in `benchmarks/paper/`: 100
clients, a fifth of them per round, E = 5 local epochs, B = 15, unless a table says otherwise. A seed changes the
partition, the network's first weights and the training.

What the paper leaves open, and what we chose:

- **Step sizes** are not given. Every method is tuned over a grid of eight settings with the same budget (below), on a
  tenth of the training set that is held out. The test set has a say in one decision: a setting with which a run
  diverges is replaced by the next best ([superseded runs](results-superseded.md)).
- **Mean of late rounds**: FedAvg, FedOVA and data sharing are judged at the mean of their *parameters* over about
  the last 20 rounds (`Averaged`). Methods labelled *plain* are not, and use the same step size. The optimisers of
  Table II are plain. (The mean of the last 20 *accuracies* is taken of all.)
  We tried windows of 10, 20, 40 and 80 rounds on held-out data (Fashion-MNIST, two labels per client, lr 0.1, 200
  rounds, one seed). FedOVA had 89.0, 88.9, 88.9 and 88.7 %, and 88.7 % without a mean. FedAvg had 89.2, 89.2, 89.1 and
  88.9 %, and 86.3 % without. These runs are not stored.
- **A shrinking local step size** (`lr_decay`) is not in the grid. On held-out data with two labels per client (one
  seed, 200 rounds of Fashion-MNIST), a factor of 0.995 per round cost FedAvg 0.6 points and gained FedOVA nothing.
  These runs are not stored either.
- {parity}
- **Inputs of CIFAR-10** are in [0, 1]. `standardised = true` helps. With it, FedAvg with lr 0.05 had 66.3 % on a
  held-out tenth after 40 rounds, IID, and 46.5 % with two labels per client. Without it, the test set gave 61.7 % IID
  after as many rounds, and 43.1 % with two labels (lr 0.03). VGG's own dropout of 0.5 was slower at first: 65.1 % IID
  with weight decay 0.0005 (`results/cifar10-standardised-trials.jsonl`). Whole runs with it are [beyond the
  paper](results-beyond.md#cifar-10-with-standardised-inputs).
- **Not tried** on these data: a weight for the positive side of FedOVA's binary losses (`positive_weight`), other first
  weights.

## Tuning

Settings are chosen by successive halving: eight settings for 15 rounds, the better four for 45, the better two for 120,
with one seed. The score is the mean validation accuracy of the last five rounds. The methods of Table II are tuned on
IID clients. The others are tuned with two labels per client, and that choice is used for every number of labels, batch
size and number of epochs. With K = 1000 (KWS 500) clients have far fewer examples, and so make fewer steps: these runs
have a choice of their own (the last rows). *Clipped* methods clip local gradients by their norm; they are ours and not
the paper's. A star marks a choice at the end of its grid: something beyond it may be better. Grids of two values
have no star.

**CIFAR-10 was tuned far less**: once, for 3, 9 and 24 rounds, and with torch's first weights in the network's head.
After 3 rounds seven of FedAvg's eight step sizes stood at 10 %. Only Adam was tuned with the weights that are used,
four settings for 16 rounds. FedOVA and data sharing took FedAvg's step size. FedDANE and Fisher L-BFGS took that of
FedAvg-SGD. FedOVA with the server step took that of FedAvg with it. K = 1000 has no choice of its own. What FedOVA
gains there is a gain over *this* FedAvg, which still rises after 100 rounds. With torch's weights FedAvg ended at
45.1 % with two labels per client and 63.2 % IID, the server step at 76.6 % IID (`results/cifar10-first-weights.jsonl`).

A choice is made after 120 rounds and used for 200 or 250. What is best early need not be best late.
{leaders}

{tuning}

## Measured with

*MB per round* are both ways. What is sent before the first round, such as shared data, is named beside it as *once*.
*Dropped* are uploads that were not finite and so left out of a mean, seed by seed. Several runs shared the GPU at a
time, and not always the same number. So do not compare these seconds: [benchmarks/speed](../benchmarks/speed/README.md)
has rounds that were timed alone.

{details}
"""


def settings(runs: Runs, store: Store, choices: Choices, note: str) -> str:
    parts = []
    for name, groups in runs.items():
        for group in groups:
            if any(store.find(entry.key) or store.find(entry.instead_of) for entry in group):
                heading = f"### {name}, {paper()['datasets'][group[0].dataset]}"
                parts += [heading, measured.details(group, store)]
    return TEXT.format(
        note=note,
        parity=parity(store).replace("\n", "\n  "),
        leaders=leaders(choices),
        tuning=tuning(choices),
        details="\n\n".join(parts),
    )
