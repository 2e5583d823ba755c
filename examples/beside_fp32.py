"""What the examples of MLPerf Tiny's networks share: one federation in integers and in full precision."""

import time
from typing import Any

import fedmpq
from fedmpq.model.metrics import auroc

# For rounds that are few and short: no moving average over them, and batches of 16.
SETTINGS: dict[str, Any] = {"budgets": (2, 4, 4, 8), "participation": 1.0, "alpha": 5.0, "batch_size": 16}


def compare(
    model: str,
    train: fedmpq.Dataset,
    test: fedmpq.Dataset,
    *,
    rounds: int,
    epochs: int,
    quick: bool,
    code_learning_rate: float,
    learning_rate: float = 0.1,
    fp32_learning_rate: float = 0.1,
    **settings: Any,
) -> None:
    """Print how good the boards of each budget are beside full precision; `quick` learns little.

    The first two rates are those of the integers; full precision has its best of 0.2, 0.1 and 0.05.
    """
    start = time.perf_counter()
    length = {"rounds": rounds, "epochs": epochs, "evaluate_every": rounds}
    common = {**SETTINGS, **settings, **({"rounds": 1, "epochs": 1, "workers": 1} if quick else length)}
    rates = {"learning_rate": learning_rate, "code_learning_rate": code_learning_rate}
    run = fedmpq.simulate(model, (train, test), averaging=0.0, **rates, **common)
    exact = fedmpq.simulate(
        model,
        (train, test),
        method="fp32",
        statistics="calibrated",
        learning_rate=fp32_learning_rate,
        **common,
    )
    last, boards = exact.history[-1], len(common["budgets"])
    metric = "auroc" if run.graph.task == "reconstruction" else "accuracy"
    print(f"{model}: {metric}, {len(train.labels)} samples on {boards} boards, {len(run.history)} rounds")
    print(f"full precision     {last[metric]:6.1%}, updates of {last['bytes_up']:,} bytes a round")
    for budget in run.budgets:
        print(f"{budget:g} bits per weight  {measured(run.deployed(budget), test):6.1%}")
    seconds = time.perf_counter() - start
    print(f"updates of {run.history[-1]['bytes_up']:,} bytes a round; {seconds:.0f} s in all")


def measured(model: fedmpq.DeployedModel, test: fedmpq.Dataset) -> float:
    """The share of right answers, or the chance that an anomaly is told from what is normal."""
    if model.graph.task == "reconstruction":
        return auroc(model.anomaly_scores(test.images), test.labels == 1) or 0.0
    return model.accuracy(test.images, test.labels)
