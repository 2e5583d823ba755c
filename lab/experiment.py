"""An experiment: every setting of a simulation, from options or a TOML file, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from fedmpq.lab.boards import Boards, BoardsError, VirtualClock, boards_text
from fedmpq.method import settings as method_settings
from fedmpq.method.setting import FLEET, LOCAL, WHAT, setting
from fedmpq.method.settings import MethodSettings, typed_settings
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.grid import MAX_BITS
from fedmpq.system.named_object import is_path
from fedmpq.training.engine import DEFAULT_ENGINE, engine_names

MAX_POPULATION = 2**31
"""Random numbers are keyed by 32 bits of a client's number, and one of them is the server's."""
PAPER_BUDGETS = (2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 6.0, 6.0, 8.0, 8.0)
DATA_HELP = "digits, fashion-mnist, cifar10:DIR, cifar100:DIR, a folder, an .npz, or your own as MODULE:CLASS"


class ExperimentError(ValueError):
    """A setting that is unknown, missing or out of range."""


@dataclass(frozen=True)
class Experiment(MethodSettings):
    """The defaults are the paper's CIFAR-10 setting, trained with the best profile."""

    error = ExperimentError

    data: str = field(metadata={"group": WHAT, "help": DATA_HELP})
    _: KW_ONLY
    size: int | None = setting(None, WHAT, "resize images to this height and width")
    train_limit: int | None = setting(None, WHAT, "use only so many training images")
    test_limit: int | None = setting(None, WHAT, "use only so many test images")
    budgets: tuple[float, ...] = setting(PAPER_BUDGETS, FLEET, "bits per weight of each client")
    alpha: float = setting(0.5, FLEET, "Dirichlet concentration of classes; inf: an even split")
    participation: float = setting(0.5, FLEET, "share of the clients in each round")
    population: int | None = setting(None, FLEET, "so many clients, over which the budgets repeat")
    client_samples: int = setting(50, FLEET, "samples of each client of a population")
    partition: str | None = setting(
        None, FLEET, "which samples each client has, by your own function", metavar="MODULE:FUNCTION"
    )
    boards: str | None = setting(
        None, FLEET, "how fast boards compute and communicate, for the virtual clock", metavar="FILE.toml"
    )
    engine: str = setting(DEFAULT_ENGINE, LOCAL, "what computes", choices=engine_names())

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_budgets()
        self._check_at_least_one("size", "train_limit", "test_limit")
        self._check_population()
        if not self.alpha > 0:
            raise ExperimentError(f"alpha = {self.alpha} must be positive (inf for an even split)")
        if not 0 < self.participation <= 1:
            raise ExperimentError(f"participation = {self.participation} is outside 0 < participation <= 1")

        self._check_clock()

    def _check_clock(self) -> None:
        if self.boards is not None:
            try:
                Boards.from_text(self.boards)
            except BoardsError as error:
                raise ExperimentError(f"boards: {error}") from None
        elif self.asynchronous is not None:
            raise ExperimentError(
                "asynchronous needs boards, by whose speeds it is decided which change comes first; "
                "give --boards FILE.toml"
            )
        if self.asynchronous is not None and self.asynchronous > self.clients:
            raise ExperimentError(
                f"asynchronous = {self.asynchronous} changes a merge, and there are {self.clients} clients, "
                "each of which gives one of every version of the model at most"
            )

    def _check_budgets(self) -> None:
        if not self.budgets:
            raise ExperimentError("budgets is empty; give one number of bits per weight for each client")
        for budget in self.budgets:
            if not 1 <= budget <= MAX_BITS:
                raise ExperimentError(f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}")

    def _check_population(self) -> None:
        if self.population is not None and not len(self.budgets) <= self.population <= MAX_POPULATION:
            raise ExperimentError(
                f"population = {self.population} is outside {len(self.budgets)}..{MAX_POPULATION}; it has at "
                "least one client for each of the budgets"
            )
        if self.client_samples < MIN_SAMPLES:
            raise ExperimentError(
                f"client_samples = {self.client_samples} is too small; the least is {MIN_SAMPLES}"
            )
        if self.partition is not None and not is_path(self.partition):
            raise ExperimentError(f"partition = {self.partition!r} is not package.module:function")

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.budgets) if self.population is None else self.population

    def budget_of(self, client: int) -> float:
        """A client's bits per weight; over a population the budgets repeat."""
        return self.budgets[client % len(self.budgets)]

    @property
    def clients_per_round(self) -> int:
        return max(1, math.floor(self.participation * self.clients + 0.5))

    @property
    def clock(self) -> VirtualClock | None:
        """How long its boards take; None: nothing is said of them."""
        return None if self.boards is None else VirtualClock(Boards.from_text(self.boards), self.seed)

    @property
    def label(self) -> str:
        """`method`, with whatever sets it apart from its plain form."""
        # A method of one's own goes by its class; labels name folders.
        parts = [self.method.rpartition(":")[2].rpartition(".")[2]]
        if not self.trains_floats:
            parts.append(self.profile)
        if self.method == "fedmpq" and self.ablation != "all":
            parts.append(self.ablation)
        if self.asynchronous is not None:
            parts.append(f"async{self.asynchronous}")
        return "-".join(parts)

    @property
    def activation_bits(self) -> int | None:
        """None for the methods that train in full precision."""
        return None if self.trains_floats else self.recipe().activation_bits

    @property
    def clips_begin(self) -> float:
        """The recipe's `first_clips`; networks that train in full precision have no clips."""
        return 1.0 if self.trains_floats else self.recipe().first_clips


def make_experiment(settings: Mapping[str, Any]) -> Experiment:
    """An experiment from plain settings; an unknown name is an error that suggests the nearest known one.

    `clients`, if given, must equal the number of budgets. `boards` may be a TOML file, whose content is kept,
    or what would be in it.
    """
    plain = dict(settings)
    if plain.get("boards") is not None:
        try:
            plain["boards"] = boards_text(plain["boards"])
        except BoardsError as error:
            raise ExperimentError(f"boards: {error}") from None
    clients = plain.pop("clients", None)
    _check_list_of_budgets(plain.get("budgets", PAPER_BUDGETS))
    values = typed_settings(Experiment, plain)
    if clients is not None and type(clients) is not int:
        raise ExperimentError(f"clients = {clients!r} is not a whole number")
    if "data" not in values:
        raise ExperimentError("data is missing; give a folder, a file or a known name such as digits")
    experiment = Experiment(**values)
    if clients is not None and clients != experiment.clients:
        raise ExperimentError(
            f"{clients} clients but {experiment.clients} budgets; give one budget for each client"
        )
    return experiment


def _check_list_of_budgets(value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise ExperimentError(f"budgets = {value!r} is not a list such as [2, 4, 8]")
    if strange := [budget for budget in value if type(budget) not in (int, float)]:
        raise ExperimentError(f"budgets holds {strange[0]!r}, which is not a number")


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, one flat table."""
    return method_settings.read_toml(path, ExperimentError)
