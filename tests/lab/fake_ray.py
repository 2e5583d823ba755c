"""In place of Ray, in one process: actors do their tasks in order when somebody waits for one, and some of
them, and of the objects that they have left, are lost by chance."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Exceptions:
    RayError, RayTaskError = RayError, RayTaskError


@dataclass(eq=False)
class Reference:
    data: bytes | None = None
    """None: not done."""
    error: RayError | None = None

    @property
    def is_ready(self) -> bool:
        return self.data is not None or self.error is not None

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        assert self.data is not None
        return pickle.loads(self.data)


@dataclass(eq=False)
class Actor:
    ray: FakeRay
    made: Any
    queue: deque[tuple[str, tuple[Any, ...], list[Reference]]] = field(default_factory=deque)
    lost: bool = False

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def step(self) -> None:
        """Does its oldest task, or is lost with all that it has to do."""
        name, arguments, references = self.queue.popleft()
        if not self.lost and self.ray.chance(self.ray.loss) and name != "prepare":
            self.lost = True
            self.ray.lost_with.append(name)
        try:
            if self.lost:
                raise RayError("the actor died")
            given = [each.value() if isinstance(each, Reference) else each for each in arguments]
            result = getattr(self.made, name)(*given)
        except RayError as error:
            # What the task was given is lost; it says so itself.
            failure = error if self.lost else RayTaskError(error)
            for reference in references:
                reference.error = failure
            return
        results = result if len(references) > 1 else (result,)
        for reference, each in zip(references, results, strict=True):
            reference.data = pickle.dumps(each)
        if len(references) > 1 and self.ray.chance(self.ray.loss):
            references[1].error = RayError("the object is lost")
            self.ray.lost_with.append("object")


@dataclass
class Method:
    actor: Actor
    name: str
    returns: int = 1

    def options(self, *, num_returns: int) -> Method:
        return Method(self.actor, self.name, num_returns)

    def remote(self, *arguments: Any) -> Any:
        references = [Reference() for _ in range(self.returns)]
        self.actor.queue.append((self.name, arguments, references))
        return references if self.returns > 1 else references[0]


class FakeRay:
    exceptions = Exceptions

    def __init__(self, seed: int, loss: float) -> None:
        self._random = random.Random(seed)
        self.loss = loss
        self.actors: list[Actor] = []
        self.lost_with: list[str] = []
        """The tasks that actors were lost with, and "object" for each object that was lost."""
        self.fetched: list[Any] = []

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def remote(self, **options: object) -> Callable[[type], Any]:
        return lambda made: _Factory(self, made)

    def put(self, value: Any) -> Reference:
        return Reference(pickle.dumps(value))

    def get(self, reference: Reference) -> Any:
        self.fetched.append(reference.value())
        return self.fetched[-1]

    def wait(
        self, references: Sequence[Reference], timeout: float | None
    ) -> tuple[list[Reference], list[Reference]]:
        while not (ready := [one for one in references if one.is_ready]):
            self._random.choice([actor for actor in self.actors if actor.queue]).step()
        return [self._random.choice(ready)], []

    def kill(self, actor: Actor) -> None:
        actor.lost = True


@dataclass
class _Factory:
    ray: FakeRay
    made: type

    def remote(self) -> Actor:
        self.ray.actors.append(Actor(self.ray, self.made()))
        return self.ray.actors[-1]
