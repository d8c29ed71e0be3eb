"""A language model: an LSTM that predicts the next character.

Every client is a poet with lines of its own. A line is one example: its characters are the input and the same
characters one place further the targets, [N, T] whole numbers for outputs [N, T, characters]. Lines differ in length:
`fedge.data.pad` pads them, and labels of padding do not count. It is judged on lines that it has seen: of so few it can
only learn some by heart.
"""

import torch
from torch import Tensor, nn

import fedge

LINES = {
    "rossetti": "who has seen the wind\nneither i nor you\nbut when the leaves hang trembling",
    "blake": "tyger tyger burning bright\nin the forests of the night\nwhat immortal hand or eye",
    "dickinson": "hope is the thing with feathers\nthat perches in the soul\nand sings the tune without the words",
    "stevenson": "i have a little shadow\nthat goes in and out with me\nand what can be the use of him",
}
LETTERS = sorted({letter for lines in LINES.values() for letter in lines} - {"\n"})


def line(text: str) -> tuple[Tensor, Tensor]:
    """The characters of a line, and those that follow them."""
    codes = torch.tensor([LETTERS.index(letter) for letter in text])
    return codes[:-1], codes[1:]


class Poet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.out = nn.Linear(64, len(LETTERS))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])  # what comes later cannot change what came before: no mask needed


def main() -> None:
    owner = [who for who, lines in LINES.items() for _ in lines.split("\n")]
    items = [line(text) for lines in LINES.values() for text in lines.split("\n")]
    data = fedge.data.from_datasets(items, items[::3], collate=fedge.data.pad)  # type: ignore[arg-type]
    federation = fedge.Federation(data, fedge.partition.by_group(owner))
    print(data)

    torch.manual_seed(0)
    algorithm = fedge.FedAvg(Poet(), lr=0.01, epochs=4, batch_size=2, optimiser="adam")
    run = fedge.train(algorithm, federation, rounds=15, observe=fedge.Observe(5))
    for record in run.history[4::5]:
        right, perplexity = 100 * record["test_accuracy"], record["test_perplexity"]
        print(f"round {record['round']:2}: {right:.1f} % of characters right, perplexity {perplexity:.1f}")
    first = {name: part[:1] for name, part in data.test_x.items()}
    guess = "".join(LETTERS[code] for code in run.predict(first)[0, : int(first["lengths"])].tolist())
    print(f"after each character of the first line it expects: {guess!r}")


if __name__ == "__main__":
    main()
