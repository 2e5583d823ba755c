"""A run's settings, from a TOML file, all checked before anything starts.

Names are those of `fedmpq simulate` where they mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedmpq.data.data_source import DataSource, MeasuredSource, Split, load_form, load_samples
from fedmpq.data.dataset import MAX_CLASSES, Dataset
from fedmpq.data.fitting import Form, numbered
from fedmpq.data.naming import named_as
from fedmpq.data.open_source import names_object, open_source
from fedmpq.data.tasks import NORMAL, trained_on
from fedmpq.data.value_range import BOARDS, ValueRange, parse_range
from fedmpq.method.recipe import QUANTIZED_METHODS
from fedmpq.method.settings import MethodSettings, parse_toml, read_toml, typed_settings
from fedmpq.model.export_formats import FORMATS
from fedmpq.model.first_model import ImageFormat
from fedmpq.server.names import NAME
from fedmpq.system.named_object import is_path

MAX_SIDE = 65536
MEASURED = 1 / 64, 128
"""Scale and zero point of codes that span a range of measured values, where nothing better is known."""


class ConfigError(ValueError):
    """A setting that is unknown, missing or out of range."""


@dataclass(frozen=True)
class RunConfig(MethodSettings):
    """One run of a method over the clients that connect."""

    error = ConfigError

    name: str
    _: KW_ONLY
    clients_per_round: int | None = None
    """Clients that train in a round, or at a time; or else `participation` says which share of those
    connected."""
    participation: float | None = None
    min_clients: int | None = None
    """Connected clients without which no round begins.

    None: `clients_per_round`, and fewer once boards are lost.
    """
    over_selection: float = 0.0
    """Share of clients selected beyond `clients_per_round`; the round closes when enough have answered."""
    quorum: float = 1.0
    """Share of `clients_per_round` without whose updates no round is merged."""
    deadline_seconds: float | None = None
    """After this long a round closes with the updates it has, if they are a quorum.

    None: what `learned_deadline` finds; 0: never, and a board that is away is waited for as long as it takes.
    """
    away_seconds: float = 300.0
    """A board that is disconnected for longer loses its place."""
    calibration_seconds: float = 300.0
    """After this long a calibration closes with the statistics it has."""
    calibration_data: str | None = None
    """Images on which the server measures BatchNorm's statistics; without them clients do, on theirs."""
    max_update_norm: float = 4.0
    """An update is refused if it moves the weights by more than this many times their norm."""
    max_samples: int = 10_000_000
    """A client that says it has more is not selected: an update counts by its samples."""
    max_accuracy_drop: float | None = None
    """A round whose model the server measures to be worse than the last by more than this share of its test
    images does not count; None: the model is taken as it is."""
    keep_models: int = 1
    """How many of the last rounds' global models stay in the store."""
    export: tuple[str, ...] = ()
    """Formats of the model files made after the last round, built in or as `package.module:Class`.

    Boards can ask for one at any time.
    """
    test_data: str | None = None
    """Measures accuracy after every round; without it clients measure on their own data."""
    image: tuple[int, ...] | None = None
    """(height, width, channels) that the model takes; by default those of `test_data`, as the four that
    follow. Images of another size or colour mode are brought to it, on the server as on boards."""
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_scale: float | None = None
    input_zero_point: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"name = {self.name!r}: letters, digits and '_.-', at most 64, please")
        if self.trains_floats:
            raise ConfigError(
                f"method = {self.method!r} trains in full precision, for which boards have no engine: theirs "
                f"train integer codes; serve one of {', '.join(QUANTIZED_METHODS)}, and compare with "
                f"{self.method} in `fedmpq simulate`"
            )
        for wanted in self.export:
            # The user's own target is loaded where models are exported: it may need torch.
            if not is_path(wanted):
                self._check_choice("export", wanted, FORMATS)
        self._check_numbers()
        self._check_clients()
        self._check_buffer()
        self._check_images()
        boards_calibrate = self.calibrates and self.calibration_data is None
        if self.max_accuracy_drop is not None and self.test_data is None and not boards_calibrate:
            raise ConfigError(
                "max_accuracy_drop needs test_data, or boards that calibrate and measure what is handed out "
                "(statistics = 'calibrated' without calibration_data)"
            )
        if self.calibration_data is not None and not self.calibrates:
            raise ConfigError("calibration_data goes with statistics = 'calibrated'")

    def _check_numbers(self) -> None:
        self._check_at_least_one("clients_per_round", "min_clients", "keep_models", "classes")
        if self.max_samples < 2:
            raise ConfigError(f"max_samples = {self.max_samples} is too small; the least is 2")
        _within("over_selection", self.over_selection, 0, 10)
        _within("deadline_seconds", self.deadline_seconds or 0.0, 0, 1e9)
        _within("away_seconds", self.away_seconds, 1, 1e9)
        _within("max_accuracy_drop", self.max_accuracy_drop or 0.0, 0, 1)
        _within("calibration_seconds", self.calibration_seconds, 1, 1e9)
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

    def _check_buffer(self) -> None:
        """Settings of rounds that mean nothing without them."""
        if self.asynchronous is None:
            return
        if self.asynchronous > self.least_clients:
            least = "clients_per_round" if self.min_clients is None else "min_clients"
            raise ConfigError(
                f"asynchronous = {self.asynchronous} is above {least} = {self.least_clients}: a merge takes "
                f"one change of each board, so it might never be made; lower it, or raise min_clients"
            )
        if self.over_selection:
            raise ConfigError(
                f"over_selection = {self.over_selection:g} does not go with asynchronous, where nobody is "
                "selected for a round: leave it out, and let clients_per_round exceed asynchronous"
            )
        if self.quorum != 1:
            raise ConfigError(
                f"quorum = {self.quorum:g} does not go with asynchronous, where a merge is made of so many "
                "changes, whoever sent them: leave it out, and lower asynchronous"
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
        if self.class_names is None and self.classes is None and self.task != "reconstruction":
            raise ConfigError("give class_names or classes = N, or test_data to take them from")
        unknown = self.input_scale is None or self.input_zero_point is None
        if unknown and self.data_range is None:
            raise ConfigError(
                "give input_scale and input_zero_point (a pixel a stands for scale * (a - zero_point)), "
                "or test_data to take them from"
            )

    @property
    def least_clients(self) -> int:
        """Connected clients a round needs to begin."""
        return self.min_clients or self.clients_per_round or 1

    @property
    def grace(self) -> float:
        """Seconds that a board may be away before it loses its place."""
        return math.inf if self.deadline_seconds == 0 else self.away_seconds

    def target(self, connected: int) -> int:
        """How many clients' updates make a whole round, with so many connected."""
        if self.clients_per_round is not None:
            return min(self.clients_per_round, connected)
        assert self.participation is not None
        return max(1, math.floor(self.participation * connected + 0.5))

    def selected(self, target: int, connected: int) -> int:
        """How many are selected for a round of `target`."""
        # 10 * 1.1 is a little above 11; the allowance keeps it from being 12.
        return min(connected, math.ceil(target * (1 + self.over_selection) - 1e-9))

    def calibrates_after(self, round_number: int) -> bool:
        """Whether the statistics of what this round made are measured: if it is evaluated. Where merges are
        asynchronous boards are asked after the last one only: before, they are at work on others."""
        if self.asynchronous is not None and self.calibration_data is None:
            return self.calibrates and round_number >= self.rounds
        return self.calibrates and self.evaluates(round_number)

    def needed(self, target: int) -> int:
        """Updates without which a round of `target` is not merged."""
        return max(1, math.ceil(self.quorum * target - 1e-9))


@dataclass(frozen=True)
class Images:
    """What the run's images are and which classes they show."""

    format: ImageFormat
    class_names: tuple[str, ...]

    @property
    def form(self) -> Form:
        return Form(self.format.height, self.format.width, self.format.channels)


def read_config(path: Path) -> RunConfig:
    """The settings of a TOML file; paths in it start from its folder, and without a name it gives its own."""
    settings = {"name": path.stem} | read_toml(path, ConfigError)
    try:
        return _located(make_config(settings), path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(text: str, folder: Path) -> RunConfig:
    """The settings of a TOML text; relative paths in it start from `folder`."""
    return _located(make_config(parse_toml(text, ConfigError, "the configuration")), folder)


def _located(config: RunConfig, folder: Path) -> RunConfig:
    return replace(
        config,
        test_data=_beside(folder, config.test_data),
        calibration_data=_beside(folder, config.calibration_data),
        weights=_beside(folder, config.weights),
    )


def _beside(folder: Path, path: str | None) -> str | None:
    """A path as seen from the folder of the configuration; a `package.module:Class` is none."""
    if path is None or names_object(path):
        return path
    return str((folder / Path(path).expanduser()).resolve())


def make_config(settings: Mapping[str, Any]) -> RunConfig:
    """A config from plain settings; an unknown name is an error that suggests the nearest known one."""
    values = typed_settings(RunConfig, settings)
    if "name" not in values:
        raise ConfigError("name is missing; a run is known by its name")
    return RunConfig(**values)


def difference(old: RunConfig, new: RunConfig, but: Sequence[str] = ()) -> str | None:
    """The first setting in which two configs differ, in words; None if they are the same `but` for some."""
    for field in fields(RunConfig):
        if field.name in but:
            continue
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            return f"{field.name} = {before!r} there and {after!r} here"
    return None


def load_test_data(
    config: RunConfig, form: Form | None = None, class_names: Sequence[str] = ()
) -> Dataset | None:
    """The run's test data as its model takes them; without a form as they are, or as `image` says.

    They are whatever a board's data may be: what has no test split is all for testing.
    """
    if config.test_data is None:
        return None
    wanted = form
    if form is None and config.image is not None:
        height, width, channels = config.image
        wanted = Form(height, width, channels)
    test = _load(config, config.test_data, "test", wanted)
    names = tuple(class_names) or config.class_names or ()
    # Classes that the run knows by number alone are the test data's own.
    if not names or (test.targets is None and numbered(names)):
        return test
    return named_as(test, names, config.task)


def load_calibration_data(config: RunConfig, form: Form) -> Dataset | None:
    """The images on which the server measures statistics: training images, or else what there is."""
    path = config.calibration_data
    return None if path is None else trained_on(_load(config, path, "train", form), config.task)


def _load(config: RunConfig, path: str, split: Split, form: Form | None) -> Dataset:
    source = open_source(path)
    there = split if split in source.splits() else source.splits()[0]
    value_range = None if form is None else form.value_range
    if value_range is None and config.data_range is not None:
        value_range = _range_so_far(config.data_range, source, there)
    if form is None:
        return load_samples(source, path, there, task=config.task).coded(value_range)
    return load_form(source, path, there, replace(form, value_range=value_range, task=config.task))


def _range_so_far(data_range: str, source: DataSource, split: Split) -> ValueRange | None:
    """The range that is given; before boards agree on one that of the data themselves, to see their shape."""
    if data_range != BOARDS:
        return parse_range(data_range)
    return source.bounds(split) if isinstance(source, MeasuredSource) else None


def images_of(config: RunConfig, test: Dataset | None) -> Images:
    """What the config says of its images, and what it leaves out as in its test data."""
    if test is not None:
        _check_test_data(config, test)
    shape = config.image or (test.image_shape if test is not None else None)
    assert shape is not None
    scale, zero_point = config.input_scale, config.input_zero_point
    if scale is None or zero_point is None:
        # Codes of a range that boards have yet to agree on are not known.
        known = test is not None and config.data_range != BOARDS
        measured = test.normalisation() if test is not None and known else MEASURED
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
    if config.classes is None and config.task == "reconstruction":
        return (NORMAL,)
    assert config.classes is not None
    return tuple(str(label) for label in range(config.classes))


def _check_test_data(config: RunConfig, test: Dataset) -> None:
    classes = len(config.class_names) if config.class_names is not None else config.classes
    if classes is not None and test.targets is not None and test.targets.shape[1] != classes:
        raise ConfigError(
            f"{config.test_data} has {test.targets.shape[1]} targets for each sample, the run names {classes}"
        )
    if classes is not None and int(test.labels.max()) >= classes:
        raise ConfigError(
            f"{config.test_data} has label {int(test.labels.max())}, the run's {classes} classes end at "
            f"{classes - 1}"
        )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value} is outside {low:g}..{high:g}")
