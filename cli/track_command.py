"""`fedmpq track`: the rounds of a run for TensorBoard or MLflow, of a server or of a simulation.

It reads what is stored and runs beside the server: a tracker that is slow or away never holds a round.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from fedmpq.cli.history_command import Told, add_run_arguments, told_of
from fedmpq.method.tracking import KINDS, Tracker, TrackingError, open_tracker

SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the rounds of a run where TensorBoard or MLflow finds them. What is there already is not "
        "written again."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq track garden --to tensorboard:logs --follow      a server's run, as it goes on\n"
        "  fedmpq track runs/fedmpq-best-0 --to mlflow:http://127.0.0.1:5000"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_run_arguments(parser)
    parser.add_argument(
        "--to", required=True, metavar="TARGET", help=" or ".join(f"{kind}:WHERE" for kind in KINDS)
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with rounds as they are merged, until it is stopped"
    )
    parser.add_argument(
        "--every",
        type=float,
        default=SECONDS,
        metavar="S",
        help="seconds between looks (default: %(default)g)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    if not arguments.every > 0:
        raise TrackingError(f"--every {arguments.every:g} is no time: give seconds above 0")
    told = told_of(arguments.run, arguments.state)
    with closing(open_tracker(arguments.to, told.name)) as tracker:
        _catch_up(tracker, told, arguments.to)
        while arguments.follow:
            time.sleep(arguments.every)
            _catch_up(tracker, told_of(arguments.run, arguments.state), arguments.to)
    return 0


def _catch_up(tracker: Tracker, told: Told, target: str) -> None:
    # A round whose model was thrown away is done anew, under the next number.
    new = [facts for facts in told.history.rounds if facts.round > tracker.last and not facts.undone]
    for facts in new:
        tracker.add(facts)
    if new:
        print(f"{told.name}: rounds {new[0].round} to {new[-1].round} written to {target}", flush=True)
