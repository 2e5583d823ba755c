"""`fedmpq simulate` as its user meets it: real files, real signals, and one line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedmpq.cli.main import main
from fedmpq.lab import simulation
from fedmpq.lab.checkpoint import FILE_NAME, load_checkpoint
from fedmpq.lab.round_log import LOG_NAME, read_log
from fedmpq.method.schedule import Schedule
from tests.in_process import InProcessPool

Capture = pytest.CaptureFixture[str]
SCRIPT = Path(sys.executable).with_name("fedmpq")
TINY = [
    "--data",
    "digits",
    "--model",
    "digits_cnn",
    "--train-limit",
    "60",
    "--test-limit",
    "30",
    "--budgets",
    "2,4,8",
    "--participation",
    "1",
    "--epochs",
    "1",
    "--batch-size",
    "8",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, from which models are imported, and an import path of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)


def simulate(capsys: Capture, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(["simulate", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def succeed(capsys: Capture, *words: str) -> str:
    code, out, err = simulate(capsys, *words)
    assert (code, err) == (0, "")
    return out


def mistake(capsys: Capture, *words: str) -> str:
    """The one line on standard error."""
    code, _, err = simulate(capsys, *words)
    assert code == 2
    assert err.startswith("fedmpq simulate: ")
    assert err.count("\n") == 1
    return err.removeprefix("fedmpq simulate: ").rstrip()


def assert_png(path: Path) -> None:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(path) as image:
        image.load()


def json_lines(text: str) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def table_rows(out: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in out.splitlines()
        if line.startswith(("┃", "│"))
    ]
    return {row[0]: row[1:] for row in cells}


# A run


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_run_says_what_it_does_and_leaves_log_checkpoint_and_picture(capsys: Capture) -> None:
    out = succeed(capsys, *TINY, "--rounds", "2", "--out", "a/run")
    lines = out.splitlines()
    assert lines[0].startswith(
        "fedmpq-best seed 0: digits_cnn (19,408 weights in 7 layers), 60 training and 30"
    )
    assert lines[1].startswith("round 1/2  W ")
    assert lines[2].startswith("round 2/2  W ")
    assert lines[3] == "picture: a/run/run.png   log: a/run/rounds.jsonl"
    assert "last round" in lines[4]
    last = read_log(Path("a/run"))[-1].accuracies
    assert last is not None
    assert table_rows(out) == {
        "method": ["W", "2 bit", "4 bit", "8 bit", "mean deployed"],
        "fedmpq-best": [
            f"{100 * last.accuracy:.1f}",
            *(f"{100 * last.deployed[b]:.1f}" for b in ("2", "4", "8")),
            f"{100 * last.mean_deployed:.1f}",
        ],
    }
    assert {path.name for path in Path("a/run").iterdir()} == {FILE_NAME, LOG_NAME, "run.png"}
    assert_png(Path("a/run/run.png"))


@pytest.mark.usefixtures("in_process")
def test_a_run_has_a_folder_by_default_and_is_not_overwritten_unasked(capsys: Capture) -> None:
    words = [*TINY, "--method", "fp32", "--rounds", "1"]
    succeed(capsys, *words)
    folder = Path("runs/fp32-digits_cnn-0")
    before = (folder / LOG_NAME).read_text()
    line = mistake(capsys, *words)
    assert line == (
        "runs/fp32-digits_cnn-0 already holds a run; --resume it, choose another --out, or --overwrite it"
    )
    assert (folder / LOG_NAME).read_text() == before
    succeed(capsys, *words, "--overwrite", "--alpha", "inf")
    assert load_checkpoint(folder).experiment.alpha == float("inf")
    assert all(record for record in json_lines((folder / LOG_NAME).read_text()))
    out = succeed(capsys, "--resume", str(folder), "--rounds", "2")
    assert "round 2/2" in out
    assert "round 1/2" not in out
    # The file does for its folder.
    assert "round 3/3" in succeed(capsys, "--resume", str(folder / FILE_NAME), "--rounds", "3")


@pytest.mark.usefixtures("in_process")
def test_a_toml_file_sets_and_an_option_overrides(capsys: Capture) -> None:
    Path("run.toml").write_text(
        'data = "digits"\nmodel = "digits_cnn"\ntrain-limit = 60\ntest_limit = 30\nbudgets = [2, 4]\n'
        "clients = 2\nepochs = 1\nbatch_size = 8\nrounds = 7\nflip = true\nparticipation = 1\n"
    )
    succeed(capsys, "--config", "run.toml", "--rounds", "1", "--no-flip", "--out", "run")
    experiment = load_checkpoint(Path("run")).experiment
    assert (experiment.rounds, experiment.flip, experiment.budgets) == (1, False, (2.0, 4.0))
    assert experiment.participation == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_what_devices_run_can_be_chosen_over_the_profile(capsys: Capture) -> None:
    words = [*TINY, "--profile", "best", "--rounds", "1", "--out"]
    succeed(capsys, *words, "own", "--averaging", "0.25", "--statistics", "averaged")
    own = load_checkpoint(Path("own"))
    assert (own.experiment.averaging, own.experiment.statistics) == (0.25, "averaged")
    assert (own.experiment.recipe().averaging, own.experiment.recipe().statistics) == (0.25, "averaged")
    assert own.model.average is not None
    succeed(capsys, *words, "none", "--averaging", "0")
    none = load_checkpoint(Path("none"))
    assert (none.experiment.recipe().averaging, none.experiment.recipe().statistics) == (0.0, "calibrated")
    assert none.model.average is None
    Path("run.toml").write_text('averaging = 0.5\nstatistics = "averaged"\nschedule = "steps"\n')
    succeed(capsys, *words, "toml", "--config", "run.toml", "--statistics", "calibrated", "--rounds", "4")
    own = load_checkpoint(Path("toml"))
    recipe = own.experiment.recipe()
    assert (recipe.averaging, recipe.statistics) == (0.5, "calibrated")
    assert (recipe.schedule, own.experiment.profile) == (Schedule("steps", 4, 0), "best")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_only_some_rounds_need_be_evaluated(capsys: Capture) -> None:
    out = succeed(capsys, *TINY, "--rounds", "3", "--evaluate-every", "2", "--out", "run")
    assert [" W " in line for line in out.splitlines() if line.startswith("round ")] == [False, True, True]
    assert [result.accuracies is not None for result in read_log(Path("run"))] == [False, True, True]


@pytest.mark.usefixtures("in_process")
def test_boards_of_a_file_give_a_clock_and_asynchronous_merges(capsys: Capture) -> None:
    Path("boards.toml").write_text("spread = 10\nlatency = 0.5\n")
    words = (*TINY, "--boards", "boards.toml", "--asynchronous", "2", "--participation", "1", "--rounds", "2")
    out = succeed(capsys, *words, "--evaluate-every", "2", "--out", "run")
    assert out.startswith("fedmpq-best-async2 seed 0")
    assert " at work, merges of 2 changes, engine " in out.splitlines()[0]
    results = read_log(Path("run"))
    shown = f"virtual time {results[-1].virtual_time:.1f} s"
    assert out.splitlines()[2].endswith(shown)
    assert table_rows(out)["method"][-1] == "virtual time"
    assert [len(result.parts) for result in results] == [2, 2]
    # It goes on without the file, for more merges than first asked for.
    Path("boards.toml").unlink()
    succeed(capsys, "--resume", "run", "--rounds", "3")
    last, longer = results[-1].virtual_time, read_log(Path("run"))[-1].virtual_time
    assert last is not None
    assert longer is not None
    assert longer > last


@pytest.mark.usefixtures("in_process")
def test_json_is_all_there_is_on_standard_output(capsys: Capture) -> None:
    code, out, err = simulate(
        capsys, *TINY, "--rounds", "2", "--json", "--out", "run", "--seed", "3", "--tail", "2"
    )
    assert code == 0
    first, second, summary = json_lines(out)
    assert [first["type"], second["type"], summary["type"]] == ["round", "round", "summary"]
    assert (first["round"], first["method"], first["seed"]) == (1, "fedmpq-best", 3)
    assert list(first["deployed"]) == ["2", "4", "8"]
    assert summary["tail"] == 2
    (row,) = summary["methods"]["fedmpq-best"]
    assert row["seed"] == 3
    assert row["accuracy"] == pytest.approx((first["accuracy"] + second["accuracy"]) / 2)
    assert "picture: run/run.png" in err


# Comparing


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_comparison_is_one_table_and_goes_on_where_it_stopped(capsys: Capture) -> None:
    words = [*TINY, "--rounds", "1", "--out", "both", "--seeds", "0,1,0", "--compare"]
    out = succeed(capsys, *words, "fedmpq:paper,aqfl, fp32,aqfl")
    rows = table_rows(out)
    assert list(rows) == ["method", "fedmpq-paper", "aqfl-best", "fp32"]
    assert rows["method"] == ["W", "2 bit", "4 bit", "8 bit", "mean deployed"]
    assert all("±" in cell for cell in rows["aqfl-best"])
    assert rows["fp32"][1:4] == ["–", "–", "–"]
    assert rows["fp32"][0] == rows["fp32"][4]
    assert "2 seeds" in out
    labels = ("fedmpq-paper", "aqfl-best", "fp32")
    folders = {f"{label}-digits_cnn-{seed}" for label in labels for seed in (0, 1)}
    assert {path.name for path in Path("both").iterdir()} == folders | {"compare.png"}
    assert_png(Path("both/compare.png"))
    # Once more, one method more: only that one runs.
    again = succeed(capsys, *words, "fedmpq:paper,aqfl,fp32,fedmpq:paper:msb")
    assert again.count("finished before") == 6
    assert again.count("round 1/1") == 2
    assert table_rows(again)["aqfl-best"] == rows["aqfl-best"]
    assert "fedmpq-paper-msb" in table_rows(again)
    # With other settings nothing is mixed, and nothing has run before that is said.
    line = mistake(capsys, *words, "fpq8,aqfl", "--learning-rate", "0.05")
    assert line.startswith("both/aqfl-best-digits_cnn-0 holds a run with other settings")
    assert not Path("both/fpq8-best-digits_cnn-0").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_what_only_fedmpq_has_does_not_disturb_the_others(capsys: Capture) -> None:
    options = ["--profile", "paper", "--deal", "pruning_growing", "--ablation", "msb+deal", "--json"]
    code, out, _ = simulate(capsys, *TINY, "--rounds", "1", "--compare", "fedmpq,aqfl", *options)
    assert code == 0
    assert list(json_lines(out)[-1]["methods"]) == ["fedmpq-paper-msb+deal", "aqfl-paper"]
    folder = Path("runs/compare-digits_cnn")
    dealt = load_checkpoint(folder / "aqfl-paper-digits_cnn-0").model.clients
    assert [client.dealt for client in dealt] == [(2,) * 7, (4,) * 7, (8,) * 7]


@pytest.mark.parametrize(
    ("compare", "words"),
    [
        ("fedmpq,aqlf", "method = 'aqlf' is none of"),
        ("fedmpq,", "method = '' is none of"),
        ("fedmpq:fast", "profile = 'fast' is none of paper, best"),
        ("fedmpq:paper:msb:x", "has too many parts; it is METHOD[:PROFILE[:ABLATION]]"),
        ("aqfl:paper:msb", "ablation = 'msb' goes with method fedmpq, not with aqfl"),
        ("fedmpq:paper:msb,fedmpq:best:msb", "ablation = 'msb' goes with profile paper, not with best"),
    ],
)
def test_a_comparison_is_checked_before_it_starts(capsys: Capture, compare: str, words: str) -> None:
    assert words in mistake(capsys, *TINY, "--compare", compare)
    assert not Path("runs").exists()


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--budgets 0.5,4", "a budget of 0.5 bits per weight is outside 1..8"),
        ("--budgets 4,9", "a budget of 9 bits per weight is outside 1..8"),
        ("--clients 5", "5 clients but 3 budgets; give one budget for each client"),
        ("--data nowhere/at/all", "nowhere/at/all: neither a known data set (digits, fashion-mnist"),
        ("--model resnet2O", "no model is called 'resnet2O'; take digits_cnn, resnet8, resnet20"),
        ("--tail 0", "--tail 0 is too small; the least is 1"),
        ("--workers 0", "--workers 0 is too small; the least is 1"),
        ("--seeds 0,1", "--seeds goes with --compare; a single run takes --seed"),
        ("--rounds 0", "rounds = 0 is too small; the least is 1"),
        ("--learning-rate nan", "learning_rate = nan must be positive and finite"),
        ("--alpha -1", "alpha = -1.0 must be positive (inf for an even split)"),
        ("--averaging 101", "averaging = 101.0 is outside 0..100: below 1 a decay, from 1 on a power"),
        ("--evaluate-every 0", "evaluate_every = 0 is too small; the least is 1"),
        ("--warmup 5 --rounds 5", "warmup = 5 is outside 0..4, the rounds before the last"),
        ("--lasso 0.01", "lasso = 0.01 goes with profile paper, not with best"),
        ("--prune-density 0", "prune_density = 0.0 goes with profile paper, not with best"),
        ("--merge models", "merge = 'models' goes with profile paper, not with best"),
        ("--schedule linear", "argument --schedule: invalid choice: 'linear'"),
        ("--statistics moved", "argument --statistics: invalid choice: 'moved'"),
        ("--method aqfl --ablation msb", "ablation = 'msb' goes with method fedmpq, not with aqfl"),
        ("--config nowhere.toml", "cannot read nowhere.toml: No such file or directory"),
        (
            "--resume nowhere",
            "--batch-size does not go with --resume; a run keeps its settings, but for --rounds",
        ),
        ("--on cloud", "on = 'cloud' is none of processes, ray and ray://HOST:PORT"),
        ("--train-limit 5", "labels of shape (5,) cannot give 3 clients 2 images each"),
        ("--size 5000", "size 5000x5000 is out of range"),
    ],
)
def test_a_wrong_setting_is_named(capsys: Capture, words: str, expected: str) -> None:
    assert mistake(capsys, *TINY, *words.split()).startswith(expected)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            'method = "fedmgq"',
            "method = 'fedmgq' is none of fedmpq, aqfl, fpq8, fp32, fedpaq, uveqfed; did you mean",
        ),
        ('model = "digits"', "no model is called 'digits'; take digits_cnn"),
        ("batchsize = 4", "there is no setting 'batchsize'; did you mean 'batch_size'?"),
        ("budgets = 4", "budgets = 4 is not a list such as [2, 4, 8]"),
        ("rounds = ", "run.toml is not valid TOML"),
        ("[train]\nrounds = 3", "run.toml: [train] is a table; settings are flat"),
    ],
)
def test_a_wrong_line_of_toml_is_named(capsys: Capture, line: str, expected: str) -> None:
    Path("run.toml").write_text(f'data = "digits"\n{line}\n')
    assert mistake(capsys, "--config", "run.toml").startswith(expected)


def test_there_must_be_data(capsys: Capture) -> None:
    assert mistake(capsys).startswith("data is missing; give a folder, a file or a known name such as digits")


def test_a_folder_that_cannot_be_made_is_named(capsys: Capture) -> None:
    Path("file").write_text("")
    assert (
        mistake(capsys, *TINY, "--out", "file") == "file is a file; choose another --out for the run's folder"
    )
    assert "Not a directory: 'file/run'" in mistake(capsys, *TINY, "--out", "file/run")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_checkpoint_that_is_missing_or_damaged_is_named(capsys: Capture) -> None:
    assert mistake(capsys, "--resume", "nowhere").startswith("there is no checkpoint at nowhere")
    Path("empty").mkdir()
    expected = "there is no checkpoint at empty/checkpoint.npz; name a run's folder or its checkpoint.npz"
    assert mistake(capsys, "--resume", "empty") == expected
    succeed(capsys, *TINY, "--rounds", "1", "--out", "run")
    path = Path("run") / FILE_NAME
    whole = path.read_bytes()
    for damaged in (b"", b"not an archive", whole[: len(whole) // 2], whole[:300] + b"\0" * 64 + whole[364:]):
        path.write_bytes(damaged)
        assert mistake(capsys, "--resume", "run").startswith("run/checkpoint.npz ")
    path.write_bytes(whole)
    assert mistake(capsys, "--resume", "run", "--rounds", "0") == "run has done 1 rounds; rounds = 0 is fewer"
    for words in (["--overwrite"], ["--out", "x"], ["--compare", "aqfl"], ["--seed", "1"], ["--no-flip"]):
        assert "does not go with --resume" in mistake(capsys, "--resume", "run", *words)
    assert succeed(capsys, "--resume", "run").count("round 1/1") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_corrupt_image_is_skipped_and_counted(capsys: Capture) -> None:
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        folder = Path("images") / label
        folder.mkdir(parents=True)
        for index in range(20):
            pixels = random.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")
    good = Path("images/cat/0.png").read_bytes()
    # A name that would be taken for markup, if names were.
    Path("images/cat/[red]half.png").write_bytes(good[: len(good) // 2])
    out = succeed(capsys, *TINY, "--data", "images", "--rounds", "1", "--out", "one")
    assert "1 image could not be read and will be left out, such as images/cat/[red]half.png: " in out
    assert "36 training and 4 test images" in out
    Path("images/dog/99.png").write_bytes(b"no image")
    out = succeed(capsys, *TINY, "--data", "images", "--rounds", "1", "--out", "two")
    assert "2 images could not be read" in out


# One's own model


def write_model(name: str, body: str, head: str = "") -> None:
    text = (
        f"import torch\nfrom torch import nn\n{head}\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes, channels):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(channels, 4, 3, padding=1)\n"
        "        self.fc = nn.Linear(4 * 64, classes)\n"
        "    def forward(self, x):\n"
        f"        {body}\n\n"
        "def build(classes, channels):\n"
        "    return Net(classes, channels)\n"
    )
    Path(f"{name}.py").write_text(text)


GOOD = "return self.fc(torch.relu(self.conv(x)).flatten(1))"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["fedmpq", "fpq8", "fp32", "uveqfed"])
def test_ones_own_model_runs(capsys: Capture, method: str) -> None:
    write_model(f"own_{method}", GOOD)
    out = succeed(capsys, *TINY, "--model", f"own_{method}:build", "--method", method, "--rounds", "1")
    assert f"own_{method}:build (2,596 weights in 2 layers)" in out
    profile = "-best" if method in ("fedmpq", "fpq8") else ""
    assert Path(f"runs/{method}{profile}-own_{method}.build-0/run.png").exists()


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        ("gone_a:build", None, "model 'gone_a:build' cannot be imported: ModuleNotFoundError: No module"),
        ("own_b:missing", "", "model 'own_b:missing' cannot be imported: AttributeError: module 'own_b'"),
        ("own_c:build", "def build(:", "model 'own_c:build' cannot be imported: SyntaxError:"),
        ("own_d:build", "build = 3", "model 'own_d:build' is a int, needs a function that builds a module"),
        (
            "own_e:build",
            "def build(): return 3",
            "model 'own_e:build' returned a int, needs a torch.nn.Module",
        ),
        (
            "own_f:build",
            "def build(): 1 / 0",
            "model 'own_f:build' failed with ZeroDivisionError: division by zero",
        ),
        (
            "own_g:build",
            "def build(depth): pass",
            "model 'own_g:build' failed with TypeError: build() missing 1",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_named(
    capsys: Capture, model: str, text: str | None, expected: str
) -> None:
    if text is not None:
        Path(f"{model.partition(':')[0]}.py").write_text(text)
    assert mistake(capsys, *TINY, "--model", model).startswith(expected)


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        (
            "op_a",
            "return self.fc(torch.sin(self.conv(x)).flatten(1))",
            "aten.sin.default in the forward of Net",
        ),
        ("op_b", "return self.fc(self.conv(x).abs().flatten(1))", "aten.abs.default in the forward of Net"),
        (
            "op_c",
            "return self.fc(self.conv(x).flatten(1)) if x.sum() > 0 else 0",
            "torch.export cannot record",
        ),
        ("op_d", "return self.fc(self.conv(x))", "torch.export cannot record"),
    ],
)
def test_a_model_that_cannot_be_traced_is_named(capsys: Capture, name: str, body: str, expected: str) -> None:
    write_model(name, body)
    assert mistake(capsys, *TINY, "--model", f"{name}:build").startswith(expected)


# Real processes


@pytest.mark.slow
def test_an_error_in_a_worker_is_one_line_too(capfd: Capture) -> None:
    """One's own model, imported anew in a real worker, and a learning rate that makes its loss no number."""
    write_model("own_real", GOOD)
    words = ["--model", "own_real:build", "--method", "fp32", "--learning-rate", "1e20", "--workers", "1"]
    code, out, err = simulate(capfd, *TINY, *words, "--rounds", "1", "--out", "run", "--json")
    assert (code, out) == (2, "")
    header, line = err.splitlines()
    assert header.startswith("fp32 seed 0: own_real:build")
    assert line.startswith("fedmpq simulate: client ")
    assert line.endswith(", round 1: the loss is nan; lower the learning rate (now 1e+20)")
    assert load_checkpoint(Path("run")).model.round == 0


class Run:
    """The installed command in a session of its own, so that its workers can be found."""

    def __init__(self, scratch: Path, *words: str) -> None:
        scratch.mkdir(exist_ok=True)
        self.scratch = scratch
        self.process = subprocess.Popen(
            [SCRIPT, "simulate", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Started in the background by a shell, the tests may have inherited a Ctrl-C that is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env={**os.environ, "TMPDIR": str(scratch)},
        )

    def wait_for_round(self) -> None:
        """Until a round is done, and some way into the next."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("round"):
                return
        raise AssertionError(f"no round: {self.end()}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def workers(self) -> list[int]:
        """Processes of the session that are alive; the command itself is not counted."""
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = stat.read_text().rpartition(")")
            except OSError:
                continue  # it ended meanwhile
            state, _, group = rest.split()[:3]
            pid = int(name.split()[0])
            if int(group) == self.process.pid != pid and state != "Z":
                alive.append(pid)
        return alive

    def assert_gone(self) -> None:
        """No workers and none of our files; torch may leave a cache of its own."""
        deadline = time.monotonic() + 60
        while left := [*self.workers(), *(path.name for path in self.scratch.glob("fedmpq-*"))]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """All that were started, to be cleared away if a test fails."""
    started: list[Run] = []
    yield started
    for one in started:
        for pid in (*one.workers(), *([one.process.pid] if one.process.poll() is None else [])):
            os.kill(pid, signal.SIGKILL)
        one.process.communicate()


@pytest.mark.slow
def test_killed_then_interrupted_then_resumed_is_as_if_nothing_had_been(
    capsys: Capture, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rates of a schedule that falls would depend on how many rounds were asked for at first.
    options = [*TINY, "--workers", "2", "--schedule", "constant"]
    runs.append(Run(tmp_path / "scratch", *options, "--rounds", "500", "--out", "run"))
    runs[0].wait_for_round()
    assert len(runs[0].workers()) >= 2
    runs[0].process.kill()
    assert runs[0].end()[0] == -signal.SIGKILL
    # Nobody was left to end the workers and to clear their files away: they do it themselves.
    runs[0].assert_gone()
    killed_at = load_checkpoint(Path("run")).model.round
    assert killed_at >= 1

    runs.append(Run(tmp_path / "scratch", "--resume", "run", "--workers", "2"))
    runs[1].wait_for_round()
    refused = subprocess.run([SCRIPT, "simulate", "--resume", "run"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "another simulation works in run; wait until it has ended" in refused.stderr
    # As a terminal does on Ctrl-C: to the command and all its workers.
    os.killpg(runs[1].process.pid, signal.SIGINT)
    code, out, err = runs[1].end()
    assert (code, err) == (130, "")
    last = out.splitlines()[-1]
    assert (
        last == "stopped; every finished round is in the checkpoint; go on with: fedmpq simulate --resume run"
    )
    runs[1].assert_gone()
    interrupted_at = load_checkpoint(Path("run")).model.round
    assert interrupted_at > killed_at

    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)
    rounds = str(interrupted_at + 2)
    succeed(capsys, "--resume", "run", "--rounds", rounds)
    succeed(capsys, *options, "--rounds", rounds, "--out", "whole")
    mended, whole = load_checkpoint(Path("run")), load_checkpoint(Path("whole"))
    assert mended.experiment == whole.experiment
    assert mended.model.clients == whole.model.clients
    assert mended.model.bit_widths == whole.model.bit_widths
    for name, tensor in (whole.model.weights | whole.model.side).items():
        assert (mended.model.weights | mended.model.side)[name].tobytes() == tensor.tobytes()
    logs = []
    for folder in ("run", "whole"):
        lines = json_lines((Path(folder) / LOG_NAME).read_text())
        logs.append([{**line, "seconds": 0, "phases": {}} for line in lines])
    assert logs[0] == logs[1]
    assert len(logs[0]) == interrupted_at + 3


# Ctrl-C at other times


def test_ctrl_c_before_anything_is_saved_promises_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "prepare", interrupted)
    code, out, err = simulate(capsys, *TINY, "--out", "run")
    assert (code, out, err) == (130, "stopped before anything was saved\n", "")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_ctrl_c_in_a_comparison_says_how_to_go_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = simulation.run

    def second_is_interrupted(prepared: simulation.Prepared, *rest: Any) -> Any:
        if prepared.experiment.method == "aqfl":
            raise KeyboardInterrupt
        return real(prepared, *rest)

    words = [*TINY, "--rounds", "1", "--compare", "fp32,aqfl", "--out", "both"]
    monkeypatch.setattr(simulation, "run", second_is_interrupted)
    code, out, _ = simulate(capsys, *words, "--overwrite")
    assert code == 130
    assert out.splitlines()[-1] == (
        "stopped; every finished round is saved; the same command, without --overwrite, goes on from there"
    )
    monkeypatch.setattr(simulation, "run", real)
    assert "both/fp32-digits_cnn-0: finished before" in succeed(capsys, *words)
