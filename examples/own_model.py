"""Train a network of your own over clients of 2, 4 and 8 bits per weight, and use what each would run."""

from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedmpq


class Garden(nn.Module):
    """An ordinary module: convolutions, BatchNorm, ReLU, additions, pools, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        return self.classifier(pooled)  # type: ignore[no-any-return]


digits = load_digits()
images, labels = (digits.images * 15.9375).astype("uint8"), digits.target

run = fedmpq.simulate(
    model=Garden(), data=(images, labels), budgets=[2, 4, 4, 8], rounds=3, epochs=2, batch_size=16
)
print(run.history)

model = run.deployed(budget=4)
print(f"{model.bits_per_weight:.2f} bits per weight: {model.bit_widths}")
print(f"the first images show {model.predict(images[:8, ..., None])}, and are {labels[:8]}")
