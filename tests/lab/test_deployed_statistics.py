"""What devices run has the statistics it needs: after rounds of many local steps on skewed data it is as
accurate as the same codes with statistics re-estimated centrally, and without a calibration it is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.named import load_named
from fedmpq.lab import simulation
from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.experiment import make_experiment
from fedmpq.lab.simulation import Prepared, prepare, run
from fedmpq.method.recipe import Statistics
from fedmpq.method.registry import integer_method
from fedmpq.model import integer_forward
from fedmpq.model.calibration import measure
from fedmpq.model.integer_program import compile_program
from tests.in_process import InProcessPool

LIMIT = 2.0
"""Points of accuracy that the boards' own statistics may cost."""
LEAST_STEPS = 100
CENTRAL_BATCH = 60


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the digits for training: points of accuracy need more test images than a fifth of them."""
    parts = load_named("digits")
    images = np.concatenate([part.images for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:900], order[900:]
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x_train=images[train], y_train=labels[train], x_test=images[test], y_test=labels[test])
    return path


@dataclass(frozen=True)
class Gap:
    deployed: float
    central: float

    @property
    def points(self) -> float:
        return 100 * (self.central - self.deployed)


def gaps(digits: Path, statistics: Statistics | None, folder: Path) -> dict[str, Gap]:
    """By budget: the accuracy that the run reports, and that of the same codes with other statistics."""
    experiment = make_experiment(
        {
            "data": str(digits),
            "model": "digits_cnn",
            "profile": "best",
            "statistics": statistics,
            # Clients go further apart without it, and so do the statistics that they have in training.
            "logit_adjustment": 0.0,
            "alpha": 0.3,
            "budgets": [2, 4, 6, 8],
            "participation": 0.75,
            "epochs": 3,
            "batch_size": 4,
            "rounds": 4,
            "evaluate_every": 4,
        }
    )
    prepared = prepare(experiment)
    steps = [len(part) // experiment.batch_size * experiment.epochs for part in prepared.parts]
    assert min(steps) >= LEAST_STEPS
    shares = run(prepared, folder, 1, lambda _: None)[-1].accuracies
    assert shares is not None
    central = re_estimated(prepared, folder)
    return {budget: Gap(shares.deployed[budget], central[budget]) for budget in ("2", "4", "6", "8")}


def re_estimated(prepared: Prepared, folder: Path) -> dict[str, float]:
    """The accuracy of what each budget runs, with statistics of all training images in one place."""
    checkpoint, test = load_checkpoint(folder), prepared.test
    graph, images = checkpoint.graph, prepared.train.images
    order = np.random.default_rng(1).permutation(len(images))
    batches = [images[order[i : i + CENTRAL_BATCH]] for i in range(0, len(order), CENTRAL_BATCH)]
    found: dict[str, float] = {}
    method, model = integer_method(checkpoint.experiment, graph), checkpoint.model
    for each in method.deployments(model, model.clients):
        side = {**each.side, **measure(graph, each.layers, each.side, batches)}
        logits = integer_forward.logits(compile_program(graph, each.layers, side), test.images)
        (client,) = each.clients
        budget = f"{client.budget:g}"
        found[budget] = float(np.mean(logits.argmax(axis=1) == test.labels))
    return found


@pytest.mark.slow
def test_deployed_accuracy_is_that_of_centrally_estimated_statistics(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)
    own = gaps(digits, None, tmp_path / "own")
    averaged = gaps(digits, "averaged", tmp_path / "averaged")
    for budget, gap in own.items():
        assert gap.points <= LIMIT, (budget, gap)
        # The codes are the same, for statistics are not trained with: only what is measured of them differs.
        assert averaged[budget].central == pytest.approx(gap.central, abs=0.005), budget
        assert averaged[budget].points > LIMIT, (budget, averaged[budget])
    # Neither is a model that has learnt nothing, of which no statistics could be wrong.
    assert min(gap.deployed for gap in own.values()) > 0.4
