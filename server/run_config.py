"""A run's settings, from a TOML file, all checked before anything starts.

Names are those of `fedmpq simulate` where they mean the same.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from fedmpq.model.data import MAX_CLASSES, Dataset, load
from fedmpq.model.exchange import PlanError, TrainingPlan
from fedmpq.model.export_formats import FORMATS
from fedmpq.model.grid import StepRule
from fedmpq.model.start import ImageFormat
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

MAX_SIDE = 65536
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class ConfigError(ValueError):
    """A setting that is unknown, missing or out of range."""


@dataclass(frozen=True)
class RunConfig:
    """One run of a method over the clients that connect."""

    name: str
    model: str = "resnet20"
    method: str = "fedmpq"
    profile: Profile = "best"
    ablation: str = "all"
    rounds: int = 50
    seed: int = 0
    clients_per_round: int | None = None
    """Clients that train in a round; or else `participation` says which share of those connected."""
    participation: float | None = None
    min_clients: int | None = None
    """Connected clients a round needs to begin; by default `clients_per_round`."""
    over_selection: float = 0.0
    """Share of clients selected beyond `clients_per_round`; the round closes when enough have answered."""
    quorum: float = 1.0
    """Share of `clients_per_round` without whose updates no round is merged."""
    deadline_seconds: float = 0.0
    """After this long a round closes with the updates it has, if they are a quorum; 0: never."""
    max_update_norm: float = 4.0
    """An update is refused if it moves the weights by more than this many times their norm."""
    max_samples: int = 10_000_000
    """A client that says it has more is not selected: an update counts by its samples."""
    keep_models: int = 1
    """How many of the last rounds' global models stay in the store."""
    export: tuple[str, ...] = ()
    """Formats of the model files made after the last round; boards can ask for one at any time."""
    test_data: str | None = None
    """Measures accuracy after every round; without it clients measure on their own data."""
    evaluate_every: int = 1
    image: tuple[int, ...] | None = None
    """(height, width, channels); by default those of `test_data`, as the four that follow."""
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_scale: float | None = None
    input_zero_point: int | None = None
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
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name = {self.name!r}: letters, digits and '_.-', at most 64, please")
        self._check_words()
        self._check_numbers()
        self._check_clients()
        self._check_images()
        try:
            self.plan()
        except PlanError as error:
            raise ConfigError(str(error)) from None

    def _check_words(self) -> None:
        for wanted in self.export:
            _choice("export", wanted, FORMATS)
        _choice("method", self.method, QUANTIZED_METHODS)
        _choice("profile", self.profile, PROFILES)
        _choice("ablation", self.ablation, tuple(ABLATIONS))
        for name, allowed in (("deal", Deal), ("step_rule", StepRule), ("merge", Merge)):
            if getattr(self, name) is not None:
                _choice(name, getattr(self, name), get_args(allowed))
        for name, plain in (("ablation", "all"), ("deal", None)):
            value = getattr(self, name)
            if self.method != "fedmpq" and value != plain:
                raise ConfigError(f"{name} = {value!r} goes with method fedmpq, not with {self.method}")

    def _check_numbers(self) -> None:
        for name in (
            "rounds",
            "clients_per_round",
            "min_clients",
            "keep_models",
            "evaluate_every",
            "classes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} is too small; the least is 1")
        if self.max_samples < 2:
            raise ConfigError(f"max_samples = {self.max_samples} is too small; the least is 2")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed = {self.seed} is outside 0..{2**32 - 1}")
        if self.averaging is not None and not 0 <= self.averaging < 1:
            raise ConfigError(f"averaging = {self.averaging} is outside 0 <= averaging < 1")
        _within("over_selection", self.over_selection, 0, 10)
        _within("deadline_seconds", self.deadline_seconds, 0, 1e9)
        for name, high in (("quorum", 1.0), ("participation", 1.0), ("max_update_norm", math.inf)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= high:
                raise ConfigError(f"{name} = {value} is outside 0 < {name} <= {high:g}")

    def _check_clients(self) -> None:
        if (self.clients_per_round is None) == (self.participation is None):
            raise ConfigError(
                "give clients_per_round (how many train in a round) or participation (which share), not both"
            )
        if self.participation is not None and self.min_clients is None:
            raise ConfigError("participation needs min_clients: how many must be connected for a round")
        if self.clients_per_round is not None and self.least_clients < self.clients_per_round:
            raise ConfigError(
                f"min_clients = {self.min_clients} is below clients_per_round = {self.clients_per_round}: "
                "a round could not be filled"
            )

    def _check_images(self) -> None:
        if self.image is not None and (
            len(self.image) != 3 or not all(1 <= side <= MAX_SIDE for side in self.image)
        ):
            raise ConfigError(f"image = {list(self.image)} is not [height, width, channels]")
        if self.input_scale is not None and not 0 < self.input_scale < math.inf:
            raise ConfigError(f"input_scale = {self.input_scale} must be positive and finite")
        if self.input_zero_point is not None and not 0 <= self.input_zero_point <= 255:
            raise ConfigError(f"input_zero_point = {self.input_zero_point} is outside 0..255")
        if self.class_names is not None:
            if not 1 <= len(set(self.class_names)) == len(self.class_names) <= MAX_CLASSES:
                raise ConfigError("class_names is empty or names a class twice")
            if self.classes not in (None, len(self.class_names)):
                raise ConfigError(f"classes = {self.classes}, but class_names has {len(self.class_names)}")
        if self.test_data is None:
            self._check_nothing_missing()

    def _check_nothing_missing(self) -> None:
        """Test data would tell the rest."""
        if self.image is None:
            raise ConfigError("give image = [height, width, channels], or test_data to take it from")
        if self.class_names is None and self.classes is None:
            raise ConfigError("give class_names or classes = N, or test_data to take them from")
        if self.input_scale is None or self.input_zero_point is None:
            raise ConfigError(
                "give input_scale and input_zero_point (a pixel a stands for scale * (a - zero_point)), "
                "or test_data to take them from"
            )

    @property
    def least_clients(self) -> int:
        """Connected clients a round needs to begin."""
        return self.min_clients or self.clients_per_round or 1

    def target(self, connected: int) -> int:
        """How many clients' updates make a whole round, with so many connected."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        assert self.participation is not None
        return max(1, math.floor(self.participation * connected + 0.5))

    def selected(self, target: int, connected: int) -> int:
        """How many are selected for a round of `target`."""
        # 10 * 1.1 is a little above 11; the allowance keeps it from being 12.
        return min(connected, math.ceil(target * (1 + self.over_selection) - 1e-9))

    def needed(self, target: int) -> int:
        """Updates without which a round of `target` is not merged."""
        return max(1, math.ceil(self.quorum * target - 1e-9))

    def plan(self) -> TrainingPlan:
        shared = {field.name for field in fields(TrainingPlan)} & {field.name for field in fields(self)}
        return TrainingPlan(**{name: getattr(self, name) for name in shared})

    def recipe(self) -> Recipe:
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
        """Every setting, as `make_config` takes it and JSON can hold it; infinity is a word."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Images:
    """What the run's images are and which classes they show."""

    format: ImageFormat
    class_names: tuple[str, ...]


def read_config(path: Path) -> RunConfig:
    """The settings of a TOML file; paths in it start from its folder, and without a name it gives its own."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return parse_config(text, path.parent, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(text: str, folder: Path, default_name: str | None = None) -> RunConfig:
    """The settings of a TOML text; relative paths in it start from `folder`."""
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ConfigError(f"[{nested[0]}] is a table; settings are flat, such as rounds = 50")
    if default_name is not None:
        settings.setdefault("name", default_name)
    config = make_config(settings)
    if config.test_data is None:
        return config
    return replace(config, test_data=str((folder / Path(config.test_data).expanduser()).resolve()))


def make_config(settings: Mapping[str, Any]) -> RunConfig:
    """A config from plain settings; an unknown name is an error that suggests the nearest known one."""
    known = [field.name for field in fields(RunConfig)]
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no setting {name!r}{hint}")
    if "name" not in values:
        raise ConfigError("name is missing; a run is known by its name")
    return RunConfig(**{name: _typed(name, value) for name, value in values.items()})


def difference(old: RunConfig, new: RunConfig) -> str | None:
    """The first setting in which two configs differ, in words; None if they are the same."""
    for field in fields(RunConfig):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            return f"{field.name} = {before!r} there and {after!r} here"
    return None


def load_test_data(config: RunConfig) -> Dataset | None:
    return None if config.test_data is None else load(config.test_data, "test")


def images_of(config: RunConfig, test: Dataset | None) -> Images:
    """What the config says of its images, and what it leaves out as in its test data."""
    if test is not None:
        _check_test_data(config, test)
    shape = config.image or (test.image_shape if test is not None else None)
    assert shape is not None
    scale, zero_point = config.input_scale, config.input_zero_point
    if scale is None or zero_point is None:
        assert test is not None
        measured = test.normalisation()
        scale = measured[0] if scale is None else scale
        zero_point = measured[1] if zero_point is None else zero_point
    height, width, channels = shape
    return Images(ImageFormat(height, width, channels, scale, zero_point), _class_names(config, test))


def _class_names(config: RunConfig, test: Dataset | None) -> tuple[str, ...]:
    if config.class_names is not None:
        return config.class_names
    # A run may have more classes than its test data shows; then they have no names but numbers.
    if test is not None and config.classes in (None, len(test.class_names)):
        return test.class_names
    assert config.classes is not None
    return tuple(str(label) for label in range(config.classes))


def _check_test_data(config: RunConfig, test: Dataset) -> None:
    if config.image is not None and tuple(config.image) != test.image_shape:
        raise ConfigError(
            f"image = {list(config.image)}, but the images of {config.test_data} are {list(test.image_shape)}"
        )
    classes = len(config.class_names) if config.class_names is not None else config.classes
    if classes is not None and int(test.labels.max()) >= classes:
        raise ConfigError(
            f"{config.test_data} has label {int(test.labels.max())}, the run's {classes} classes end at "
            f"{classes - 1}"
        )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value} is outside {low:g}..{high:g}")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} = {value!r} is none of {', '.join(allowed)}{hint}")


_ANNOTATIONS = {field.name: str(field.type).removesuffix(" | None") for field in fields(RunConfig)}
_OPTIONAL = {field.name for field in fields(RunConfig) if field.default is None}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "tuple[int, ...]": ((int,), "a list of whole numbers"),
    "tuple[str, ...]": ((str,), "a list of words in quotes"),
}
_WORD = ((str,), "a word in quotes")


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type; TOML writes 1 where 1.0 is meant, and nothing else is converted."""
    if value is None and name in _OPTIONAL:
        return None
    annotation = _ANNOTATIONS[name]
    kinds, wanted = _KINDS.get(annotation, _WORD)
    if annotation == "float" and value == "inf":
        return math.inf
    if annotation.startswith("tuple"):
        if not isinstance(value, list | tuple) or not all(_is(item, kinds) for item in value):
            raise ConfigError(f"{name} = {value!r} is not {wanted}")
        return tuple(value)
    if not _is(value, kinds):
        raise ConfigError(f"{name} = {value!r} is not {wanted}")
    return _as_float(name, value) if annotation == "float" else value


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} holds a number too large for any use") from None
