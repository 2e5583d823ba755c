"""Flower's Ray simulation: FedAvg over all clients in every round. Run in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Work, given, kept_network, train


class StampedFedAvg(FedAvg):
    """FedAvg that notes when each round was merged; a client that failed ends the run."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients
        )
        self._work = work

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed in round {server_round}: {reply.error}")
        merged = super().aggregate_train(server_round, replies)
        self._work.stamp()
        return merged


def main() -> None:
    work = given()
    server, client = ServerApp(), ClientApp()

    @server.main()
    def serve(grid: Grid, _: Context) -> None:
        arrays = ArrayRecord(work.network().state_dict())
        StampedFedAvg(work).start(grid, arrays, num_rounds=work.rounds)

    @client.train()
    def fit(message: Message, context: Context) -> Message:
        mine, number = kept_network(work), int(context.node_config["partition-id"])
        mine.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(mine, work, number)
        metrics = MetricRecord({"num-examples": len(work.data(number)[0])})
        content = RecordDict({"arrays": ArrayRecord(mine.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": work.workers}}
    run_simulation(server, client, work.clients, backend_config=backend)


if __name__ == "__main__":
    main()
