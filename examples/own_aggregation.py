"""A method of your own: the median of the clients' changes in place of their mean.

On the command line and in a run.toml the same class is named examples.own_aggregation:MedianOfChanges.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

import fedmpq


class MedianOfChanges(fedmpq.QuantizedMethod):
    """Robust against a client that sends nonsense, at the price of holding all changes at once."""

    def merge(self, model: fedmpq.GlobalModel, updates: Iterable[fedmpq.Update]) -> fedmpq.GlobalModel:
        kept = list(updates)
        merged = super().merge(model, kept)
        moved = [super(MedianOfChanges, self).merge(model, [update]) for update in kept]
        weights = {
            name: np.median([one.weights[name] for one in moved], axis=0).astype(np.float32)
            for name in model.weights
        }
        average = None if merged.average is None else replace(merged.average, weights=weights)
        return replace(merged, weights=weights, average=average)


if __name__ == "__main__":
    run = fedmpq.simulate(
        "digits_cnn",
        "digits",
        budgets=[2, 4, 4, 8],
        method=MedianOfChanges,
        participation=1.0,
        rounds=3,
        epochs=2,
        batch_size=16,
    )
    print(run.history)
