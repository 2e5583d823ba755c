"""Weights to start a run from, wherever they are: a state dict, a simulation's run or a server's."""

from __future__ import annotations

from pathlib import Path

from fedmpq.method.warm_start import EarlierWeights, read_weights
from fedmpq.server.state_folder import StateFolder


def earlier_weights(path: str) -> EarlierWeights:
    """Those of a torch state dict, of a simulation's run, or of the newest run in a server's folder."""
    state = StateFolder(Path(path).expanduser())
    if not state.exists:
        return read_weights(path)
    # Needs the database's packages, which a simulation alone does without.
    from fedmpq.server.stored_run import read_stored_run

    final = read_stored_run(state).model.final
    return EarlierWeights.of_model(path, final.weights, final.side)
