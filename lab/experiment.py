"""An experiment: every setting of a simulation, from options or a TOML file, checked before anything runs."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedmpq.edge_client.engine import DEFAULT_ENGINE, engine_names
from fedmpq.model.exchange import PlanError, TrainingPlan
from fedmpq.model.grid import MAX_BITS, StepRule
from fedmpq.server.recipe import (
    ABLATIONS,
    PROFILES,
    QUANTIZED_METHODS,
    Deal,
    Merge,
    Profile,
    Recipe,
    make_recipe,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPER_BUDGETS = (2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 6.0, 6.0, 8.0, 8.0)
FLOAT_METHODS = ("fp32", "fedpaq", "uveqfed")
METHODS = QUANTIZED_METHODS + FLOAT_METHODS
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class ExperimentError(ValueError):
    """A setting that is unknown, missing or out of range."""


@dataclass(frozen=True)
class Experiment:
    """The defaults are the paper's CIFAR-10 setting, trained with the best profile."""

    data: str
    method: str = "fedmpq"
    profile: Profile = "best"
    ablation: str = "all"
    model: str = "resnet20"
    size: int | None = None
    train_limit: int | None = None
    test_limit: int | None = None
    budgets: tuple[float, ...] = PAPER_BUDGETS
    alpha: float = 0.5
    rounds: int = 50
    participation: float = 0.5
    evaluate_every: int = 1
    """Rounds from one evaluation to the next; the last round always has one."""
    seed: int = 0
    engine: str = DEFAULT_ENGINE
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.9
    momentum_bits: int = 32
    weight_decay: float = 5e-4
    code_learning_rate: float = 0.1
    lasso: float = 0.01
    prune_density: float = 0.03
    pad: int = 0
    flip: bool = False
    side_bits: int = 16
    deal: Deal | None = None
    step_rule: StepRule | None = None
    merge: Merge | None = None
    per_channel: bool = False
    averaging: float | None = None
    moved_statistics: bool | None = None

    def __post_init__(self) -> None:
        self._check_words()
        self._check_budgets()
        self._check_numbers()
        self._check_own_choices()
        try:
            self.plan()
        except PlanError as error:
            raise ExperimentError(str(error)) from None

    def _check_words(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("profile", self.profile, PROFILES)
        _choice("ablation", self.ablation, tuple(ABLATIONS))
        _choice("engine", self.engine, engine_names())
        for name, allowed in (("deal", Deal), ("step_rule", StepRule), ("merge", Merge)):
            if getattr(self, name) is not None:
                _choice(name, getattr(self, name), get_args(allowed))

    def _check_budgets(self) -> None:
        if not self.budgets:
            raise ExperimentError("budgets is empty; give one number of bits per weight for each client")
        for budget in self.budgets:
            if not 1 <= budget <= MAX_BITS:
                raise ExperimentError(f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}")

    def _check_numbers(self) -> None:
        if not self.alpha > 0:
            raise ExperimentError(f"alpha = {self.alpha} must be positive (inf for an even split)")
        if not 0 < self.participation <= 1:
            raise ExperimentError(f"participation = {self.participation} is outside 0 < participation <= 1")
        for name in ("rounds", "evaluate_every", "size", "train_limit", "test_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExperimentError(f"{name} = {value} is too small; the least is 1")
        if self.averaging is not None and not 0 <= self.averaging < 1:
            raise ExperimentError(f"averaging = {self.averaging} is outside 0 <= averaging < 1")
        for name in ("learning_rate", "code_learning_rate"):
            if getattr(self, name) > _MAX_FLOAT32:
                raise ExperimentError(f"{name} = {getattr(self, name)} is beyond single precision")
        if not 0 <= self.seed < 2**32:
            raise ExperimentError(f"seed = {self.seed} is outside 0..{2**32 - 1}")

    def _check_own_choices(self) -> None:
        """An ablation and a deal are FedMPQ's to choose; they are what the other methods are."""
        for name, plain in (("ablation", "all"), ("deal", None)):
            value = getattr(self, name)
            if self.method != "fedmpq" and value != plain:
                raise ExperimentError(f"{name} = {value!r} goes with method fedmpq, not with {self.method}")

    @property
    def clients(self) -> int:
        return len(self.budgets)

    @property
    def clients_per_round(self) -> int:
        return max(1, math.floor(self.participation * self.clients + 0.5))

    @property
    def label(self) -> str:
        """`method`, with whatever sets it apart from its plain form."""
        parts = [self.method]
        if self.method in QUANTIZED_METHODS:
            parts.append(self.profile)
        if self.method == "fedmpq" and self.ablation != "all":
            parts.append(self.ablation)
        return "-".join(parts)

    @property
    def activation_bits(self) -> int | None:
        """None for the methods that train in full precision."""
        return self.recipe().activation_bits if self.method in QUANTIZED_METHODS else None

    def plan(self) -> TrainingPlan:
        shared = {field.name for field in fields(TrainingPlan)} & {field.name for field in fields(self)}
        return TrainingPlan(**{name: getattr(self, name) for name in shared})

    def recipe(self) -> Recipe:
        """The recipe of a quantized method, with the settings that override its profile's."""
        return make_recipe(
            self.method,
            self.profile,
            self.ablation,
            self.plan(),
            deal=self.deal,
            step_rule=self.step_rule,
            merge=self.merge,
            per_channel=self.per_channel,
            averaging=self.averaging,
            moved_statistics=self.moved_statistics,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as `make_experiment` takes it; JSON has no infinity, so that one is a word."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}


def make_experiment(settings: Mapping[str, Any]) -> Experiment:
    """An experiment from plain settings; an unknown name is an error that suggests the nearest known one.

    `clients`, if given, must equal the number of budgets.
    """
    known = {field.name for field in fields(Experiment)}
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    clients = values.pop("clients", None)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ExperimentError(f"there is no setting {name!r}{hint}")
    if clients is not None and type(clients) is not int:
        raise ExperimentError(f"clients = {clients!r} is not a whole number")
    if "data" not in values:
        raise ExperimentError("data is missing; give a folder, a file or a known name such as digits")
    experiment = Experiment(**{name: _typed(name, value) for name, value in values.items()})
    if clients is not None and clients != experiment.clients:
        raise ExperimentError(
            f"{clients} clients but {experiment.clients} budgets; give one budget for each client"
        )
    return experiment


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, one flat table."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is not valid TOML: {error}") from None
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ExperimentError(f"{path}: [{nested[0]}] is a table; settings are flat, such as rounds = 50")
    return settings


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ExperimentError(f"{name} = {value!r} is none of {', '.join(allowed)}{hint}")


_ANNOTATIONS = {field.name: str(field.type) for field in fields(Experiment)}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number"),
    "bool": ((bool,), "true or false"),
    "bool | None": ((bool, type(None)), "true or false"),
}
_WORD = ((str, type(None)), "a word in quotes")


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type; TOML writes 1 where 1.0 is meant, and nothing else is converted."""
    if name == "budgets":
        return _budgets(value)
    annotation = _ANNOTATIONS[name]
    if annotation == "float" and value == "inf":
        return math.inf
    kinds, wanted = _KINDS.get(annotation, _WORD)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ExperimentError(f"{name} = {value!r} is not {wanted}")
    return _as_float(name, value) if annotation.startswith("float") and value is not None else value


def _budgets(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise ExperimentError(f"budgets = {value!r} is not a list such as [2, 4, 8]")
    if strange := [budget for budget in value if type(budget) not in (int, float)]:
        raise ExperimentError(f"budgets holds {strange[0]!r}, which is not a number")
    return tuple(_as_float("budgets", budget) for budget in value)


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ExperimentError(f"{name} holds a number too large for any use") from None
