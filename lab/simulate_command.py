"""`fedmpq simulate`: federated training of many clients on one machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedmpq.edge_client.engine import engine_names
from fedmpq.lab import report, simulation
from fedmpq.lab.checkpoint import FILE_NAME
from fedmpq.lab.experiment import METHODS, Experiment, ExperimentError, make_experiment, read_toml
from fedmpq.lab.simulation import Listener, Prepared, RoundResult
from fedmpq.lab.workers import default_workers
from fedmpq.model import zoo
from fedmpq.model.grid import StepRule
from fedmpq.server.recipe import ABLATIONS, PROFILES, Deal, Merge

EPILOG = """examples:
  fedmpq simulate --data digits --model digits_cnn --rounds 20 --batch-size 16
  fedmpq simulate --data cifar10/ --model resnet20 --budgets 2,2,4,4,4,6,6,6,8,8 --alpha 0.5 --rounds 50
  fedmpq simulate --data digits --model digits_cnn --compare fedmpq,aqfl,fp32 --seeds 0,1,2
  fedmpq simulate --config paper.toml --rounds 10
  fedmpq simulate --resume runs/fedmpq-paper-resnet20-0

A run's folder gets rounds.jsonl (one JSON object a round), checkpoint.npz and run.png."""

ON_CTRL_C = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; those of the experiment have no default here, so that a TOML file can set them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Train one model over many simulated clients, each with its own budget of bits per weight."
    parser.epilog = EPILOG
    parser.set_defaults(**{})
    run = parser.add_argument_group("running")
    run.add_argument("--config", type=Path, metavar="FILE.toml", help="settings, named as the options below")
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/METHOD-MODEL-SEED)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR; only --rounds may change")
    run.add_argument("--compare", metavar="LIST", help="several methods on the same seeds: METHOD[:PROFILE[:ABLATION]],...")
    run.add_argument("--seeds", type=_ints, metavar="LIST", help="with --compare: the seeds (default: --seed)")
    run.add_argument("--tail", type=int, default=3, help="rounds at the end that the table averages (default: 3)")
    run.add_argument("--workers", type=int, help="client processes at a time (default: one a core)")
    run.add_argument("--overwrite", action="store_true", help="replace a run that is already in the folder")
    run.add_argument("--json", action="store_true", help="print JSON objects, one a line, instead of text")
    _add_experiment_arguments(parser)


def _add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    def option(group: Any, flag: str, **kwargs: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(Experiment, name, None)
        if default is not None and not isinstance(default, tuple | bool):
            kwargs["help"] += f" (default: {default})"
        group.add_argument(flag, default=argparse.SUPPRESS, **kwargs)

    what = parser.add_argument_group("what to train")
    option(what, "--data", metavar="DIR", help="digits, fashion-mnist, cifar10:DIR, cifar100:DIR, or a folder or .npz")
    option(what, "--model", help=f"{', '.join(zoo.names())}, or your own as MODULE:FUNCTION")
    option(what, "--method", choices=METHODS, help="the federated method")
    option(what, "--profile", choices=PROFILES, help="the paper's choices or the measured best ones")
    option(what, "--ablation", choices=tuple(ABLATIONS), help="FedMPQ with parts switched off")
    option(what, "--size", type=int, help="resize images to this height and width")
    option(what, "--train-limit", type=int, help="use only so many training images")
    option(what, "--test-limit", type=int, help="use only so many test images")

    fleet = parser.add_argument_group("the fleet")
    option(fleet, "--clients", type=int, help="number of clients; must equal the number of budgets")
    option(fleet, "--budgets", type=_floats, metavar="LIST", help="bits per weight of each client (default: the paper's ten)")
    option(fleet, "--alpha", type=float, help="Dirichlet concentration of the classes; inf for an even split")
    option(fleet, "--participation", type=float, help="share of the clients in each round")
    option(fleet, "--rounds", type=int, help="number of rounds")
    option(fleet, "--seed", type=int, help="seed of everything random")

    local = parser.add_argument_group("local training")
    option(local, "--engine", choices=engine_names(), help="what computes")
    option(local, "--epochs", type=int, help="local epochs a round")
    option(local, "--batch-size", type=int, help="samples a step")
    option(local, "--learning-rate", type=float, help="eta")
    option(local, "--code-learning-rate", type=float, help="eta_eff of the best profile's integer update")
    option(local, "--momentum", type=float, help="momentum factor")
    option(local, "--momentum-bits", type=int, choices=(0, 8, 32), help="how momentum of the codes is stored")
    option(local, "--weight-decay", type=float, help="coupled weight decay")
    option(local, "--lasso", type=float, help="Group Lasso strength lambda")
    option(local, "--prune-density", type=float, help="MSB pruning threshold epsilon")
    option(local, "--pad", type=int, help="random crops from images padded by so many pixels")
    option(local, "--flip", action="store_true", help="random horizontal flips")

    expert = parser.add_argument_group("overriding the profile")
    option(expert, "--deal", choices=get_args(Deal), help="who gets which bits")
    option(expert, "--step-rule", choices=get_args(StepRule), help="how steps are chosen")
    option(expert, "--merge", choices=get_args(Merge), help="average models, or their changes")
    option(expert, "--per-channel", action="store_true", help="one step per output channel")


def run_command(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command; errors in the input are the caller's to print."""
    console = Console(stderr=arguments.json, highlight=False)
    try:
        if arguments.tail < 1:
            raise ExperimentError(f"--tail {arguments.tail} is too small; the least is 1")
        if arguments.workers is not None and arguments.workers < 1:
            raise ExperimentError(f"--workers {arguments.workers} is too small; the least is 1")
        if arguments.resume is not None:
            return _resume(arguments, console)
        if arguments.compare is not None:
            return _compare(arguments, console)
        return _single(arguments, console)
    except KeyboardInterrupt:
        where = arguments.resume or arguments.out
        hint = f"; go on with: fedmpq simulate --resume {where}" if where and not arguments.compare else ""
        console.print(f"stopped; every finished round is in the checkpoint{hint}", soft_wrap=True)
        return ON_CTRL_C


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The TOML file's settings, overridden by the options given."""
    file = read_toml(arguments.config) if arguments.config else {}
    own = {"config", "out", "resume", "compare", "seeds", "tail", "workers", "overwrite", "json", "command"}
    given = {name: value for name, value in vars(arguments).items() if name not in own}
    return {name.replace("-", "_"): value for name, value in file.items()} | given


def _single(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.seeds is not None:
        raise ExperimentError("--seeds goes with --compare; a single run takes --seed")
    experiment = make_experiment(_settings(arguments))
    arguments.out = arguments.out or Path("runs") / _folder_name(experiment)
    _claim(arguments.out, arguments.overwrite)
    prepared = simulation.prepare(experiment)
    results = _run(prepared, arguments.out, arguments, console)
    _finish({experiment.label: [results]}, arguments, console)
    return 0


def _resume(arguments: argparse.Namespace, console: Console) -> int:
    given = _settings(arguments)
    rounds = given.pop("rounds", None)
    if given or arguments.compare or arguments.out:
        name = next(iter(given), "compare" if arguments.compare else "out")
        raise ExperimentError(f"--{name.replace('_', '-')} cannot be changed on --resume; only --rounds can")
    prepared = simulation.reopen(arguments.resume, rounds)
    results = _run(prepared, arguments.resume, arguments, console)
    _finish({prepared.experiment.label: [results]}, arguments, console)
    return 0


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    settings = _settings(arguments)
    base = make_experiment(settings)
    seeds = arguments.seeds or (base.seed,)
    folder = arguments.out or Path("runs") / f"compare-{base.model}"
    runs: dict[str, list[list[RoundResult]]] = {}
    for experiment in [_variant(base, spec) for spec in arguments.compare.split(",")]:
        for seed in seeds:
            seeded = replace(experiment, seed=seed)
            results = _run_or_reuse(seeded, folder / _folder_name(seeded), arguments, console)
            runs.setdefault(experiment.label, []).append(results)
    _finish(runs, arguments, console)
    picture = folder / "compare.png"
    report.plot_comparison(runs, f"{base.model} on {Path(base.data).name}, alpha = {base.alpha:g}", picture)
    _say(console, f"picture: {picture}")
    return 0


def _variant(base: Experiment, spec: str) -> Experiment:
    """`METHOD[:PROFILE[:ABLATION]]` on otherwise equal settings."""
    parts = spec.strip().split(":")
    if len(parts) > 3:
        raise ExperimentError(f"--compare {spec!r} has too many parts; it is METHOD[:PROFILE[:ABLATION]]")
    return replace(base, **dict(zip(("method", "profile", "ablation"), parts, strict=False)))


def _run_or_reuse(
    experiment: Experiment, folder: Path, arguments: argparse.Namespace, console: Console
) -> list[RoundResult]:
    """A run of a comparison that was broken off goes on, and a finished one is only read."""
    if (folder / FILE_NAME).exists() and not arguments.overwrite:
        prepared = simulation.reopen(folder)
        if prepared.experiment != experiment:
            raise ExperimentError(f"{folder} holds a run with other settings; choose another --out or --overwrite")
        if prepared.start.model.round == experiment.rounds:
            _say(console, f"{folder}: finished before, read from its log")
            return simulation.read_log(folder)
    else:
        prepared = simulation.prepare(experiment)
    return _run(prepared, folder, arguments, console)


def _run(prepared: Prepared, folder: Path, arguments: argparse.Namespace, console: Console) -> list[RoundResult]:
    experiment, graph = prepared.experiment, prepared.start.graph
    _say(
        console,
        f"[bold]{experiment.label}[/bold] seed {experiment.seed}: {experiment.model} "
        f"({sum(graph.layer_sizes):,} weights in {len(graph.layers)} layers), {len(prepared.train):,} training and "
        f"{len(prepared.test):,} test images, {experiment.clients} clients, {experiment.clients_per_round} a round, "
        f"engine {experiment.engine}",
    )
    if skipped := len(prepared.train.skipped) + len(prepared.test.skipped):
        path, reason = (prepared.train.skipped + prepared.test.skipped)[0]
        _say(console, f"[yellow]{skipped} images could not be read and are left out[/yellow], such as {path}: {reason}")
    with _listener(experiment, arguments, console) as listener:
        results = simulation.run(prepared, folder, arguments.workers or default_workers(), listener)
    names = [node.name for node in graph.layers]
    picture = folder / "run.png"
    report.plot_run(results, names, f"{experiment.label}, {experiment.model}, seed {experiment.seed}", picture)
    _say(console, f"picture: {picture}   log: {folder / simulation.LOG_NAME}")
    return results


@contextmanager
def _listener(experiment: Experiment, arguments: argparse.Namespace, console: Console) -> Iterator[Listener]:
    """A bar on a terminal, and a line a round anywhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting workers", total=None)

        def listen(progress: simulation.Progress) -> None:
            done = progress.round if progress.result else progress.round - 1 + 0.9 * progress.done / progress.selected
            what = f"round {progress.round}/{progress.rounds}, {progress.done}/{progress.selected} clients"
            bar.update(task, description=what, completed=done, total=progress.rounds)
            if progress.result is None:
                return
            if arguments.json:
                print(json.dumps({"type": "round", "method": experiment.label, **asdict(progress.result)}), flush=True)
            else:
                console.print(report.round_line(progress.result, progress.rounds), soft_wrap=True)

        yield listen


def _finish(
    runs: dict[str, list[list[RoundResult]]], arguments: argparse.Namespace, console: Console
) -> None:
    summaries = {
        method: [report.Summary.of(results, arguments.tail) for results in seeds] for method, seeds in runs.items()
    }
    if arguments.json:
        rows = {method: [asdict(summary) for summary in seeds] for method, seeds in summaries.items()}
        print(json.dumps({"type": "summary", "tail": arguments.tail, "methods": rows}), flush=True)
    else:
        console.print(report.summary_table(summaries, arguments.tail))


def _claim(folder: Path, overwrite: bool) -> None:
    if (folder / FILE_NAME).exists() and not overwrite:
        raise ExperimentError(f"{folder} already holds a run; --resume it, choose another --out, or --overwrite it")


def _folder_name(experiment: Experiment) -> str:
    model = experiment.model.replace(":", ".").replace("/", ".")
    return f"{experiment.label}-{model}-{experiment.seed}"


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
    sys.stdout.flush()


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """The command on its own, for `python -m fedmpq.lab.simulate_command`."""
    parser = argparse.ArgumentParser(prog="fedmpq simulate")
    add_arguments(parser)
    return run_command(parser.parse_args(argv))
