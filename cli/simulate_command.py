"""`fedmpq simulate`: federated training of many clients on one machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from fedmpq.cli.tracked_rounds import tracking
from fedmpq.lab import report, simulation
from fedmpq.lab.checkpoint import FILE_NAME, load_checkpoint
from fedmpq.lab.experiment import (
    Experiment,
    ExperimentError,
    make_experiment,
    read_toml,
)
from fedmpq.lab.pool import PROCESSES, require_place
from fedmpq.lab.progress import watched
from fedmpq.lab.round_log import LOG_NAME, RoundResult, logged_results
from fedmpq.lab.simulation import Prepared
from fedmpq.method.setting import EXPERT, FLEET, LOCAL, WHAT, FieldType, field_types

N = TypeVar("N", int, float)
Runs = dict[str, dict[int, list[RoundResult]]]
"""Results by label and seed."""

EPILOG = """examples:
  fedmpq simulate --data digits --model digits_cnn --rounds 20 --batch-size 16
  fedmpq simulate --data cifar10/ --model resnet20 --rounds 50 \\
                  --budgets 2,2,4,4,4,6,6,6,8,8 --alpha 0.5
  fedmpq simulate --data digits --model digits_cnn \\
                  --compare fedmpq,aqfl,fp32 --seeds 0,1,2
  fedmpq simulate --config paper.toml --rounds 10
  fedmpq simulate --data digits --model digits_cnn --boards boards.toml \\
                  --participation 1 --asynchronous 5 --rounds 200
  fedmpq simulate --resume runs/fedmpq-paper-resnet20-0

A run's folder gets rounds.jsonl (one JSON object a round), checkpoint.npz
and run.png; a comparison's gets one such folder a run, and compare.png."""

ON_CTRL_C = 130
# A pipe or a file has no width, and a table should not be folded to a guess of one.
UNBOUNDED_WIDTH = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; those of the experiment have no default here, so that a TOML file can set them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "%(prog)s --data DATA [--config FILE.toml] [options]\n       %(prog)s --resume DIR [--rounds N]"
    )
    parser.description = (
        "Train one model over many simulated clients, each with its own budget of bits per weight."
    )
    parser.epilog = EPILOG
    run = parser.add_argument_group("running")
    run.add_argument("--config", type=Path, metavar="FILE.toml", help="settings, named as the options below")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/METHOD-MODEL-SEED)"
    )
    run.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with the run in DIR; only --rounds may change"
    )
    run.add_argument("--compare", metavar="LIST", help="METHOD[:PROFILE[:ABLATION]],... on the same seeds")
    run.add_argument(
        "--seeds", type=_ints, metavar="LIST", help="with --compare: the seeds (default: --seed)"
    )
    run.add_argument(
        "--tail", type=int, metavar="N", default=1, help="last rounds the table averages (default: 1)"
    )
    run.add_argument("--workers", type=int, metavar="N", help="clients at a time (default: one a core)")
    run.add_argument(
        "--on",
        metavar="PLACE",
        default=PROCESSES,
        help="where clients train: processes (default), ray (on this machine), or ray://HOST:PORT",
    )
    run.add_argument(
        "--track", metavar="TARGET", help="write every round to tensorboard:FOLDER or mlflow:URI too"
    )
    run.add_argument("--overwrite", action="store_true", help="replace a run that is already in the folder")
    run.add_argument("--json", action="store_true", help="print JSON objects, one a line, instead of text")
    _add_experiment_arguments(parser)


def _add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each setting, from the setting's own words."""
    types = field_types(Experiment)
    groups = {title: parser.add_argument_group(title) for title in (WHAT, FLEET, LOCAL, EXPERT)}
    groups[FLEET].add_argument(
        "--clients",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="number of clients; must equal the number of budgets",
    )
    for each in sorted(fields(Experiment), key=lambda each: each.name != "data"):
        if "help" in each.metadata:
            groups[each.metadata["group"]].add_argument(
                f"--{each.name.replace('_', '-')}",
                default=argparse.SUPPRESS,
                help=each.metadata["help"] + _default(each.default),
                **_shape(types[each.name], each.metadata),
            )


def _shape(kind: FieldType, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How the option is parsed and shown."""
    if kind.plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    parse = {int: int, float: float, tuple[float, ...]: _floats}.get(kind.plain, str)
    if choices := metadata.get("choices") or kind.words:
        return {"type": parse, "choices": choices}
    letters = {int: "N", float: "X", tuple[float, ...]: "LIST"}
    return {"type": parse, "metavar": metadata.get("metavar") or letters.get(kind.plain)}


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return f" (default: {','.join(f'{item:g}' for item in value)})"
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f" (default: {value})" if plain else ""


def run_command(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command; errors in the input are the caller's to print."""
    console = _console(arguments.json)
    for name in ("tail", "workers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ExperimentError(f"--{name} {value} is too small; the least is 1")
    require_place(arguments.on)
    if arguments.seeds is not None and arguments.compare is None:
        raise ExperimentError("--seeds goes with --compare; a single run takes --seed")
    try:
        if arguments.resume is not None:
            return _resume(arguments, console)
        if arguments.compare is not None:
            return _compare(arguments, console)
        return _single(arguments, console)
    except KeyboardInterrupt:
        _say(console, _how_to_go_on(arguments))
        return ON_CTRL_C


def _how_to_go_on(arguments: argparse.Namespace) -> str:
    if arguments.compare is not None:
        without = ", without --overwrite," if arguments.overwrite else ""
        return f"stopped; every finished round is saved; the same command{without} goes on from there"
    if arguments.resume is None:
        return "stopped before anything was saved"
    words = ["fedmpq", "simulate", "--resume", str(arguments.resume)]
    return f"stopped; every finished round is in the checkpoint; go on with: {shlex.join(words)}"


def _console(json_on_stdout: bool) -> Console:
    """Text for a person: on standard error where standard output is for a program."""
    stream = sys.stderr if json_on_stdout else sys.stdout
    width = None if stream.isatty() else UNBOUNDED_WIDTH
    # No markup and no emoji: paths and error messages may hold anything.
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


_OWN = {
    "config",
    "out",
    "resume",
    "compare",
    "seeds",
    "tail",
    "workers",
    "track",
    "on",
    "overwrite",
    "json",
    "command",
}
"""What is about the running and not of the experiment."""


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The TOML file's settings, overridden by the options given."""
    file = read_toml(arguments.config) if arguments.config else {}
    given = {name: value for name, value in vars(arguments).items() if name not in _OWN}
    return {name.replace("-", "_"): value for name, value in file.items()} | given


def _single(arguments: argparse.Namespace, console: Console) -> int:
    experiment = make_experiment(_settings(arguments))
    folder = arguments.out or Path("runs") / _folder_name(experiment)
    _claim(folder, arguments.overwrite)
    prepared = simulation.prepare(experiment)
    arguments.resume = folder
    results = _run(prepared, folder, arguments, console)
    _finish({experiment.label: {experiment.seed: results}}, arguments, console)
    return 0


def _resume(arguments: argparse.Namespace, console: Console) -> int:
    given = vars(arguments).keys() - _OWN - {"rounds"}
    given |= {name for name in ("config", "out", "compare", "overwrite") if getattr(arguments, name)}
    if given:
        flag = min(given).replace("_", "-")
        raise ExperimentError(
            f"--{flag} does not go with --resume; a run keeps its settings, but for --rounds"
        )
    if arguments.resume.name == FILE_NAME:
        arguments.resume = arguments.resume.parent
    prepared = simulation.reopen(arguments.resume, getattr(arguments, "rounds", None))
    results = _run(prepared, arguments.resume, arguments, console)
    _finish({prepared.experiment.label: {prepared.experiment.seed: results}}, arguments, console)
    return 0


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    base = make_experiment(_settings(arguments))
    folder = arguments.out or Path("runs") / f"compare-{_plain(base.model)}"
    seeds = arguments.seeds or (base.seed,)
    variants = [_variant(base, spec) for spec in arguments.compare.split(",")]
    # A name or a seed given twice runs once. All are looked at before the first one starts.
    experiments = dict.fromkeys(replace(variant, seed=seed) for variant in variants for seed in seeds)
    folders = {experiment: folder / _folder_name(experiment) for experiment in experiments}
    if not arguments.overwrite:
        for experiment, own in folders.items():
            _claim_or_reuse(experiment, own)
    runs: Runs = {}
    for experiment, own in folders.items():
        results = _run_or_reuse(experiment, own, arguments, console)
        runs.setdefault(experiment.label, {})[experiment.seed] = results
    _finish(runs, arguments, console)
    picture = folder / "compare.png"
    title = f"{base.model} on {Path(base.data).name}, {base.clients} clients, alpha = {base.alpha:g}"
    report.plot_comparison({label: list(seeds.values()) for label, seeds in runs.items()}, title, picture)
    _say(console, f"picture: {picture}")
    return 0


def _variant(base: Experiment, spec: str) -> Experiment:
    """`METHOD[:PROFILE[:ABLATION]]` on otherwise equal settings."""
    parts = spec.strip().split(":")
    if len(parts) > 3:
        raise ExperimentError(f"--compare {spec!r} has too many parts; it is METHOD[:PROFILE[:ABLATION]]")
    # What only FedMPQ has to choose is not asked of the others.
    changes: dict[str, Any] = {} if parts[0] == "fedmpq" else {"ablation": "all", "deal": None}
    changes |= zip(("method", "profile", "ablation"), parts, strict=False)
    return replace(base, **changes)


def _claim_or_reuse(experiment: Experiment, folder: Path) -> None:
    if (folder / FILE_NAME).exists() and load_checkpoint(folder).experiment != experiment:
        raise ExperimentError(
            f"{folder} holds a run with other settings; choose another --out or --overwrite"
        )


def _run_or_reuse(
    experiment: Experiment, folder: Path, arguments: argparse.Namespace, console: Console
) -> list[RoundResult]:
    """A run of a comparison that was broken off goes on, and a finished one is only read."""
    if arguments.overwrite or not (folder / FILE_NAME).exists():
        return _run(simulation.prepare(experiment), folder, arguments, console)
    prepared = simulation.reopen(folder)
    if prepared.start.model.round == experiment.rounds:
        _say(console, f"{folder}: finished before, read from its log")
        return logged_results(folder, experiment.rounds)
    return _run(prepared, folder, arguments, console)


def _run(
    prepared: Prepared, folder: Path, arguments: argparse.Namespace, console: Console
) -> list[RoundResult]:
    experiment, graph = prepared.experiment, prepared.start.graph
    _say(
        console,
        f"{experiment.label} seed {experiment.seed}: {experiment.model} "
        f"({sum(graph.layer_sizes):,} weights in {len(graph.layers)} layers), "
        f"{len(prepared.train):,} training and {len(prepared.test):,} test images, "
        f"{experiment.clients} clients, {_at_a_time(experiment)}, engine {experiment.engine}",
        style="bold",
    )
    if skipped := prepared.train.skipped + prepared.test.skipped:
        (path, reason), noun = skipped[0], "image" if len(skipped) == 1 else "images"
        text = f"{len(skipped)} {noun} could not be read and will be left out, such as {path}: {reason}"
        _say(console, text, style="yellow")

    def tell(result: RoundResult) -> None:
        track(result)
        if arguments.json:
            run = {"method": experiment.label, "seed": experiment.seed}
            _print_json({"type": "round", **run, **result.to_dict()})
        else:
            _say(console, report.round_line(result, experiment.rounds))

    done = prepared.start.model.round
    with (
        tracking(arguments.track, folder, done, partial(_say, console)) as track,
        watched(console, tell) as listener,
    ):
        results = simulation.run(prepared, folder, arguments.workers, listener, arguments.on)
    picture = folder / "run.png"
    title = f"{experiment.label}, {experiment.model} on {Path(experiment.data).name}, seed {experiment.seed}"
    report.plot_run([each.facts() for each in results], [node.name for node in graph.layers], title, picture)
    _say(console, f"picture: {picture}   log: {folder / LOG_NAME}")
    return results


def _at_a_time(experiment: Experiment) -> str:
    count, merged = experiment.clients_per_round, experiment.asynchronous
    return f"{count} a round" if merged is None else f"{count} at work, merges of {merged} changes"


def _finish(runs: Runs, arguments: argparse.Namespace, console: Console) -> None:
    rounds = min(len(results) for seeds in runs.values() for results in seeds.values())
    tail = min(arguments.tail, rounds)
    summaries = {
        label: {seed: report.Summary.of(results, tail) for seed, results in seeds.items()}
        for label, seeds in runs.items()
    }
    if arguments.json:
        methods = {
            label: [{"seed": seed, **asdict(summary)} for seed, summary in seeds.items()]
            for label, seeds in summaries.items()
        }
        _print_json({"type": "summary", "tail": tail, "methods": methods})
    else:
        rows = {label: list(seeds.values()) for label, seeds in summaries.items()}
        console.print(report.summary_table(rows, tail))


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, allow_nan=False), flush=True)


def _claim(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"{folder} is a file; choose another --out for the run's folder")
    if (folder / FILE_NAME).exists() and not overwrite:
        raise ExperimentError(
            f"{folder} already holds a run; --resume it, choose another --out, or --overwrite it"
        )


def _folder_name(experiment: Experiment) -> str:
    return f"{experiment.label}-{_plain(experiment.model)}-{experiment.seed}"


def _plain(model: str) -> str:
    return model.replace(":", ".").replace("/", ".")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True)


def _floats(text: str) -> tuple[float, ...]:
    return tuple(_number(part, float, "2,4,8") for part in text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(_number(part, int, "0,1,2") for part in text.split(","))


def _number(text: str, kind: Callable[[str], N], example: str) -> N:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give a list such as {example}") from None
