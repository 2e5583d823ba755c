"""The settings of a method: what a simulation and a federation's run have in common, from options or TOML."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedmpq.data.dataset import DataError
from fedmpq.data.value_range import BOARDS, parse_range
from fedmpq.exchange.float_messages import Compression
from fedmpq.exchange.messages import PlanError, TrainingPlan
from fedmpq.method.float_method import FloatRecipe
from fedmpq.method.recipe import (
    ABLATIONS,
    FIRST_CLIPS,
    FLOAT_METHODS,
    GROWING_AVERAGE,
    METHODS,
    Deal,
    Merge,
    Profile,
    Recipe,
    Statistics,
    make_recipe,
)
from fedmpq.method.robust import Aggregation
from fedmpq.method.schedule import Schedule, ScheduleKind
from fedmpq.method.setting import EXPERT, FLEET, LOCAL, WHAT, field_types, setting, typed
from fedmpq.method.staleness import MAX_POWER, MAX_STALENESS, Buffering, require_bufferable
from fedmpq.model import zoo
from fedmpq.model.grid import StepRule
from fedmpq.model.task import CLASSIFICATION, Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMPRESSIONS: dict[str, Compression] = {"fp32": "none", "fedpaq": "fedpaq", "uveqfed": "uveqfed"}
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


_PLAN = TrainingPlan()
MAX_AVERAGING = 100.0
"""A power by which the last of a hundred rounds is half of the average."""
MAX_FIRST_CLIPS = 1000.0


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A method, how its clients train, and for how long."""

    error: ClassVar[type[ValueError]]
    """Raised for a setting that is unknown, missing or out of range."""

    task: Task = setting("classification", WHAT, "what the model is for, which says its loss and its metric")
    model: str = setting("resnet20", WHAT, f"{', '.join(zoo.names())}, or your own as MODULE:FUNCTION")
    weights: str | None = setting(
        None, WHAT, "start from a torch state dict (.pt) or from the folder of an earlier run", metavar="FILE"
    )
    data_range: str | None = setting(
        None,
        WHAT,
        "measured values that 8-bit codes stand for: LOW..HIGH, with commas one for each channel; or boards: "
        "what all clients agree on",
        metavar="RANGE",
    )
    method: str = setting(
        "fedmpq", WHAT, f"{', '.join(METHODS)}, or a class of your own as MODULE:CLASS", metavar="METHOD"
    )
    profile: Profile = setting("best", WHAT, "the paper's choices or the measured best ones")
    ablation: str = setting(
        "all",
        WHAT,
        "FedMPQ with parts switched off (paper profile only, but for aqfl)",
        choices=tuple(ABLATIONS),
    )
    rounds: int = setting(50, FLEET, "number of rounds")
    evaluate_every: int = setting(1, FLEET, "rounds from one evaluation to the next; the last always has one")
    seed: int = setting(0, FLEET, "seed of everything random")
    asynchronous: int | None = setting(
        None, FLEET, "merge every so many changes, as boards are ready, and not in rounds of selected boards"
    )
    staleness_power: float = setting(
        0.5, FLEET, "asynchronous: a change of S merges ago counts (1 + S)^-X as much as a new one"
    )
    staleness_limit: int = setting(
        20, FLEET, "asynchronous: a change of more merges ago than this is dropped"
    )
    epochs: int = setting(_PLAN.epochs, LOCAL, "local epochs a round")
    batch_size: int = setting(_PLAN.batch_size, LOCAL, "samples a step")
    learning_rate: float = setting(_PLAN.learning_rate, LOCAL, "eta")
    momentum: float = setting(_PLAN.momentum, LOCAL, "momentum factor")
    momentum_bits: int | None = setting(
        None,
        LOCAL,
        "how momentum of the codes is stored (default: 8; 32 in the paper profile)",
        choices=(0, 8, 32),
    )
    weight_decay: float = setting(_PLAN.weight_decay, LOCAL, "coupled weight decay")
    code_learning_rate: float = setting(
        _PLAN.code_learning_rate, LOCAL, "eta_eff of the best profile's integer update"
    )
    lasso: float | None = setting(
        None, LOCAL, f"Group Lasso strength lambda (paper profile only; default: {_PLAN.lasso})"
    )
    prune_density: float | None = setting(
        None, LOCAL, f"MSB pruning threshold epsilon (paper profile only; default: {_PLAN.prune_density})"
    )
    logit_adjustment: float | None = setting(
        None,
        LOCAL,
        "how much of its own frequencies of classes a client's loss is told; 0: none (best: 1; others: 0)",
    )
    pad: int = setting(_PLAN.pad, LOCAL, "random crops from images padded by so many pixels")
    flip: bool = setting(_PLAN.flip, LOCAL, "random horizontal flips")
    side_bits: int = setting(
        _PLAN.side_bits, LOCAL, "bits in which side tensors cross the network", choices=(16, 32)
    )
    warmup: int = setting(0, LOCAL, "rounds in which the learning rates rise to where the schedule begins")
    deal: Deal | None = setting(None, EXPERT, "who gets which bits (FedMPQ only)")
    step_rule: StepRule | None = setting(None, EXPERT, "how steps are chosen")
    merge: Merge | None = setting(None, EXPERT, "average models (paper profile only), or their changes")
    aggregation: Aggregation | None = setting(
        None,
        EXPERT,
        "how updates are merged, and how much one client can do to it (best: agreement; paper: mean)",
    )
    share_limit: float | None = setting(
        None,
        EXPERT,
        "no client counts for more than so many times the fleet's median one (best: 3; paper: inf)",
    )
    per_channel: bool = setting(False, EXPERT, "one step per output channel")
    first_clips: float | None = setting(
        None,
        EXPERT,
        "where clips of activations begin: so many times 3 behind a ReLU, times 4 behind that of a sum "
        f"(best: {FIRST_CLIPS:g}; paper: 1)",
    )
    averaging: float | None = setting(
        None,
        EXPERT,
        "of the average over the rounds that devices run: below 1 its decay, from 1 on the power of a "
        f"round's number by which it counts (best: {GROWING_AVERAGE:g}), 0: none",
    )
    statistics: Statistics | None = setting(
        None,
        EXPERT,
        "BatchNorm's, in what devices run: averaged while training, or measured for it (best)",
    )
    schedule: ScheduleKind | None = setting(
        None, EXPERT, "how the learning rates change over the rounds (best: cosine; others: constant)"
    )

    def __post_init__(self) -> None:
        for name in ("learning_rate", "code_learning_rate"):
            if getattr(self, name) > _MAX_FLOAT32:
                raise self.error(f"{name} = {getattr(self, name)} is beyond single precision")
        self._check_words()
        self._check_data_range()
        self._check_at_least_one("rounds", "evaluate_every")
        if not 0 <= self.warmup < self.rounds:
            raise self.error(
                f"warmup = {self.warmup} is outside 0..{self.rounds - 1}, the rounds before the last"
            )
        if not 0 <= self.seed < 2**32:
            raise self.error(f"seed = {self.seed} is outside 0..{2**32 - 1}")
        if self.averaging is not None and not 0 <= self.averaging <= MAX_AVERAGING:
            raise self.error(
                f"averaging = {self.averaging} is outside 0..{MAX_AVERAGING:g}: below 1 a decay, from 1 on a "
                "power"
            )
        if self.first_clips is not None and not 0 < self.first_clips <= MAX_FIRST_CLIPS:
            raise self.error(
                f"first_clips = {self.first_clips} is outside 0 < first_clips <= {MAX_FIRST_CLIPS:g}"
            )
        if self.share_limit is not None and not self.share_limit >= 1:
            raise self.error(f"share_limit = {self.share_limit} is too small; the least is 1, inf is none")
        for name in ("aggregation", "share_limit", "first_clips"):
            if self.trains_floats and getattr(self, name) is not None:
                raise self.error(f"{name} goes with methods that train integer codes, not with {self.method}")
        self._check_plan()
        self._check_asynchronous()

    def _check_plan(self) -> None:
        if self.logit_adjustment and self.task != CLASSIFICATION:
            raise self.error(
                f"logit_adjustment = {self.logit_adjustment} goes with task classification, not with "
                f"{self.task}: leave it out"
            )
        try:
            self.plan()
        except PlanError as error:
            raise self.error(str(error)) from None

    def _check_asynchronous(self) -> None:
        """Settings that cannot be had without rounds are refused, with the reason."""
        self._check_at_least_one("asynchronous")
        if not 0 <= self.staleness_power <= MAX_POWER:
            raise self.error(f"staleness_power = {self.staleness_power} is outside 0..{MAX_POWER:g}")
        if not 0 <= self.staleness_limit <= MAX_STALENESS:
            raise self.error(f"staleness_limit = {self.staleness_limit} is outside 0..{MAX_STALENESS}")
        if self.asynchronous is None:
            return
        if self.trains_floats:
            raise self.error(
                f"asynchronous goes with methods that train integer codes, not with {self.method}: it sums "
                "changes of several versions of the model in whole numbers"
            )
        require_bufferable(self.recipe(), self.error)

    def _check_data_range(self) -> None:
        if self.data_range not in (None, BOARDS):
            try:
                parse_range(str(self.data_range))
            except DataError as error:
                raise self.error(f"data_range: {error}") from None

    def _check_words(self) -> None:
        # One of its own is a class, named as "package.module:Class"; it is loaded when a run begins.
        if ":" not in self.method:
            self._check_choice("method", self.method, METHODS)
        types = field_types(type(self))
        for each in fields(self):
            words = types[each.name].words or each.metadata.get("choices") or ()
            value = getattr(self, each.name)
            if words and isinstance(value, str):
                self._check_choice(each.name, value, words)
        # An ablation and a deal are FedMPQ's to choose; they are what the other methods are.
        for name, plain in (("ablation", "all"), ("deal", None)):
            value = getattr(self, name)
            if self.method in METHODS and self.method != "fedmpq" and value != plain:
                raise self.error(f"{name} = {value!r} goes with method fedmpq, not with {self.method}")
        self._check_best()

    def _check_best(self) -> None:
        """The best profile returns changes: there are no planes of the model to thin out and prune."""
        given: dict[str, Any] = {"lasso": self.lasso, "prune_density": self.prune_density}
        if self.ablation not in ("all", "aqfl"):
            given["ablation"] = self.ablation
        if self.merge == "models":
            given["merge"] = self.merge
        for name, value in given.items():
            if self._is_best and value is not None:
                raise self.error(f"{name} = {value!r} goes with profile paper, not with best")

    def _check_choice(self, name: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise self.error(f"{name} = {value!r} is none of {', '.join(allowed)}{hint}")

    def _check_at_least_one(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise self.error(f"{name} = {value} is too small; the least is 1")

    def evaluates(self, round_number: int) -> bool:
        """Whether that round's model is evaluated: every so many rounds, and the last."""
        return round_number % self.evaluate_every == 0 or round_number >= self.rounds

    def plan(self) -> TrainingPlan:
        """How clients train at the schedule's full rates; what is None is the profile's choice."""
        shared = {each.name for each in fields(TrainingPlan)} & {each.name for each in fields(self)}
        given = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        return TrainingPlan(**(self._best_plan() if self._is_best else {}) | given)

    def _best_plan(self) -> dict[str, Any]:
        """The best profile's own choices."""
        return {"momentum_bits": 8, "logit_adjustment": 1.0 if self.task == CLASSIFICATION else 0.0}

    @property
    def calibrates(self) -> bool:
        """Whether clients measure the statistics of what is handed out."""
        return (self.statistics or ("calibrated" if self._is_best else "averaged")) == "calibrated"

    def rates(self) -> Schedule:
        """How the learning rates change over the rounds."""
        own: ScheduleKind = "cosine" if self._is_best else "constant"
        return Schedule(self.schedule or own, self.rounds, self.warmup)

    @property
    def _is_best(self) -> bool:
        return self.profile == "best" and not self.trains_floats

    @property
    def trains_floats(self) -> bool:
        """Whether clients train in full precision, not integer codes."""
        return self.method in FLOAT_METHODS

    def float_recipe(self) -> FloatRecipe:
        """The recipe of a method that trains in full precision."""
        return FloatRecipe(
            compression=_COMPRESSIONS[self.method],
            averaging=self.averaging or 0.0,
            statistics="calibrated" if self.calibrates else "averaged",
            plan=self.plan(),
            schedule=self.rates(),
        )

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
            # The best profile's own rule compares the updates of a round, and here there is none.
            aggregation=self.aggregation or (None if self.asynchronous is None else "mean"),
            share_limit=self.share_limit,
            per_channel=self.per_channel,
            first_clips=self.first_clips,
            averaging=self.averaging,
            statistics=self.statistics,
            schedule=self.rates(),
            buffering=self._buffering(),
        )

    def _buffering(self) -> Buffering | None:
        if self.asynchronous is None:
            return None
        return Buffering(self.asynchronous, self.staleness_power, self.staleness_limit)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as `typed_settings` takes it; JSON has no infinity, so that one is a word."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}


def typed_settings(kind: type[MethodSettings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings as their fields' types; an unknown name is an error that suggests the nearest one."""
    known = field_types(kind)
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise kind.error(f"there is no setting {name!r}{hint}")
    return {name: typed(kind.error, name, known[name], value) for name, value in values.items()}


def read_toml(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """The settings of a TOML file, one flat table."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not valid TOML: {problem}") from None
    return parse_toml(text, error, str(path))


def parse_toml(text: str, error: type[ValueError], name: str) -> dict[str, Any]:
    """The settings of a TOML text, which errors call by `name`."""
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise error(f"{name} is not valid TOML: {problem}") from None
    if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
        raise error(f"{name}: [{nested[0]}] is a table; settings are flat, such as rounds = 50")
    return settings
