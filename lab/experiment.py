"""An experiment: every setting of a simulation, from the command line or a TOML file, checked before anything runs."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from fedmpq.edge_client.engine import engine_names
from fedmpq.model.exchange import PlanError, TrainingPlan
from fedmpq.model.grid import MAX_BITS, StepRule
from fedmpq.server.recipe import ABLATIONS, PROFILES, Deal, Merge, Profile, Recipe, ablated, aqfl, fedmpq, fpq8

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPER_BUDGETS = (2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 6.0, 6.0, 8.0, 8.0)
QUANTIZED_METHODS = ("fedmpq", "aqfl", "fpq8")
FLOAT_METHODS = ("fp32", "fedpaq", "uveqfed")
METHODS = QUANTIZED_METHODS + FLOAT_METHODS


class ExperimentError(ValueError):
    """A setting that is unknown, missing or out of range."""


@dataclass(frozen=True)
class Experiment:
    """The defaults are the paper's CIFAR-10 setting."""

    data: str
    method: str = "fedmpq"
    profile: Profile = "paper"
    ablation: str = "all"
    model: str = "resnet20"
    size: int | None = None
    train_limit: int | None = None
    test_limit: int | None = None
    budgets: tuple[float, ...] = PAPER_BUDGETS
    alpha: float = 0.5
    rounds: int = 50
    participation: float = 0.5
    seed: int = 0
    engine: str = "torch"
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.9
    momentum_bits: int = 32
    weight_decay: float = 5e-4
    code_learning_rate: float = 0.01
    lasso: float = 0.01
    prune_density: float = 0.03
    pad: int = 0
    flip: bool = False
    deal: Deal | None = None
    step_rule: StepRule | None = None
    merge: Merge | None = None
    per_channel: bool = False

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("profile", self.profile, PROFILES)
        _choice("ablation", self.ablation, tuple(ABLATIONS))
        _choice("engine", self.engine, engine_names())
        for name, allowed in (("deal", Deal), ("step_rule", StepRule), ("merge", Merge)):
            if getattr(self, name) is not None:
                _choice(name, getattr(self, name), get_args(allowed))
        if not self.budgets:
            raise ExperimentError("budgets is empty; give one number of bits per weight for each client")
        for budget in self.budgets:
            if not 1 <= budget <= MAX_BITS:
                raise ExperimentError(f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}")
        if not (self.alpha > 0):
            raise ExperimentError(f"alpha = {self.alpha} must be positive (inf for an even split)")
        if not 0 < self.participation <= 1:
            raise ExperimentError(f"participation = {self.participation} is outside 0 < participation <= 1")
        for name in ("rounds", "size", "train_limit", "test_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExperimentError(f"{name} = {value} is too small; the least is 1")
        if not 0 <= self.seed < 2**32:
            raise ExperimentError(f"seed = {self.seed} is outside 0..{2**32 - 1}")
        try:
            self.plan()
        except PlanError as error:
            raise ExperimentError(str(error)) from None

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
        if self.method == "fedmpq":
            recipe = ablated(self.profile, self.plan(), self.ablation)
        else:
            recipe = {"aqfl": aqfl, "fpq8": fpq8}[self.method](self.profile, self.plan())
        overrides = {
            name: getattr(self, name) for name in ("deal", "step_rule", "merge") if getattr(self, name) is not None
        }
        return replace(recipe, per_channel=self.per_channel, **overrides)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    if "data" not in values:
        raise ExperimentError("data is missing; give a folder, a file or a known name such as digits")
    if "budgets" in values:
        values["budgets"] = tuple(float(budget) for budget in values["budgets"])
    experiment = Experiment(**{name: _typed(name, value) for name, value in values.items()})
    if clients is not None and clients != experiment.clients:
        raise ExperimentError(f"{clients} clients but {experiment.clients} budgets; give one budget for each client")
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
        raise ExperimentError(f"{name} = {value!r} is none of {', '.join(allowed)}")


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "tuple[float, ...]": (tuple,),
}
_ANNOTATIONS = {field.name: str(field.type) for field in fields(Experiment)}


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type; TOML writes 1 where 1.0 is meant, and nothing else is converted."""
    annotation = _ANNOTATIONS[name]
    kinds = _KINDS.get(annotation, (str, type(None)))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ExperimentError(f"{name} = {value!r} is not of type {annotation}")
    return float(value) if annotation == "float" else value
