"""pfl-research: federated averaging over all clients in every round, one process of torchrun a worker.

Run in an environment of its own.
"""

from __future__ import annotations

import itertools

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import get_default_framework_module, set_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import Work, given, optimizer


class Network(nn.Module):
    """The network as pfl wants it: with its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, images: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return nn.functional.cross_entropy(self.inner(images), labels)

    @torch.no_grad()
    def metrics(self, images: torch.Tensor, labels: torch.Tensor, eval: bool = True) -> dict[str, object]:
        """pfl asks for them in the first round, which does not count."""
        return {"loss": Weighted(float(self.loss(images, labels, eval)) * len(labels), len(labels))}


class Stamps(TrainingProcessCallback):
    """Notes when each round is over."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if get_default_framework_module().distributed.global_rank == 0:
            self._work.stamp()
        return False, Metrics()


def main() -> None:
    work = given()
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    network = Network(work.network())
    model = PyTorchModel(
        network,
        local_optimizer_create=lambda parameters, lr: optimizer(parameters, lr),
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    everyone = itertools.cycle(range(work.clients))
    train = FederatedDataset(
        lambda client: Dataset(raw_data=list(work.data(client)), user_id=str(client)), lambda: next(everyone)
    )
    parameters = NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=work.rounds + 1,
        train_cohort_size=work.clients,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_num_epochs=work.epochs,
        local_learning_rate=work.learning_rate,
        local_batch_size=work.batch,
    )
    FederatedAveraging().run(
        parameters, SimulatedBackend(training_data=train, val_data=None), model, local, None, [Stamps(work)]
    )


if __name__ == "__main__":
    main()
