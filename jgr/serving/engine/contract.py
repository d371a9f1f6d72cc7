# SPDX-License-Identifier: Apache-2.0
"""What a family of models gives the one engine: how its requests become work, and its outcomes become answers.

`jgr.serving.decoders.serve` and `jgr.serving.scorers.serve` are the two families. The engine
(`jgr.serving.engine.engine`) knows no more of either than what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from msgspec import UnsetType

from jgr.cache.meta import CacheMeta
from jgr.cache.neighbours import Neighbours
from jgr.cache.pool import DevicePool
from jgr.catalog.catalog import Catalog
from jgr.config import Config
from jgr.serving.api import Answer, Item, ModelInfo, Request, Reuse, Usage
from jgr.serving.engine.metrics import Metrics
from jgr.serving.errors import RequestError
from jgr.serving.explanations import Explanation
from jgr.serving.policies.fidelity import Watch
from jgr.serving.policies.jobs import Job, Kind, Start
from jgr.serving.policies.ordering import Ordering
from jgr.serving.policies.policy import Policy
from jgr.serving.prefill import Asked

Progress = Callable[[int, int, str], None]
"""Called with (done, total, label) after each step of a warm-up, in the thread that takes it."""
Status = Literal["starting", "ready", "draining", "failed"]


class Executors(Protocol):
    """Compiled programs with their buffers, on lanes. One thread makes a lane's launches, in the order of its runs, and
    one its collects; the same one where a single run may be in flight."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""

    @property
    def in_flight(self) -> int:
        """The most runs of a lane that are started and not yet collected."""

    def warm_up(self, progress: Progress) -> None:
        """Compile every program and run it once. Raises what that raises."""

    def bind(self) -> None:
        """Called in each of a lane's threads before anything else."""

    def launch(self, start: Start, work: Any) -> Any:
        """Hand the work to the device, on the lane of `start`; returns what `collect` takes, without waiting for it."""

    def collect(self, start: Start, pending: Any) -> Sequence[Any]:
        """Wait for the device: an outcome for each of `start.work`, in order."""


class Task(Protocol):
    """A validated request."""

    request: Any
    usage: Usage

    @property
    def kind(self) -> Kind: ...


T = TypeVar("T", bound=Task)


class Served(Protocol[T]):
    """One version of one model over one catalog. All methods are called on the engine's event loop; the properties
    never change.

    metrics: may be shared with other versions. normalize: how an answer's scores are normalised; unset for scorers.
    """

    metrics: Metrics

    @property
    def normalize(self) -> Literal["valid", "full"] | UnsetType: ...

    @property
    def executors(self) -> Executors: ...

    @property
    def info(self) -> ModelInfo:
        """What is served, and the limits on its requests."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def meta(self) -> CacheMeta | Neighbours | None:
        """The meta service of its cache; None where nothing is cached."""

    @property
    def pool(self) -> DevicePool | None:
        """What its cache stands in; None where nothing is cached."""

    @property
    def compares(self) -> bool:
        """Whether some of what it reuses is computed again, for `shadows`."""

    @property
    def watch(self) -> Watch | None:
        """Whether its approximate answers are good enough; None: none are approximate."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that each part of the model takes, on the device and on the host, by the part's name."""

    def measured(self) -> Any:
        """What the warm-up found that runs take, as plain data that JSON takes."""

    def policy(self, measured: bytes | None = None) -> Policy[Any]:
        """A new policy. Called once more after the warm-up, when the costs of the programs are known. measured: the
        JSON of another engine's `measured`, in place of its own."""

    async def read(self, request: Asked) -> Any:
        """What a request's texts say, read by other threads, for `prepare`; None: nothing. Called for requests with
        texts. Raises RequestError, which names the text that a limit or the model refuses."""

    def prepare(self, request: Asked, tenant: str, read: Any = None, /) -> T:
        """Check a request and make its task. tenant: whose the user's cache entries are; "": nobody's. read: of `read`.

        Raises RequestError, which names the field that the catalog, a limit or the model refuses.
        """

    def job(self, task: T, job_id: int, arrival_ns: int, deadline_ns: int | None) -> Job:
        """The task's size and times, for the policy."""

    def foreseen(self, task: T, now_ns: int) -> tuple[bool, int] | None:
        """What a hint comes to where nothing is to be computed for it: whether its user is kept, and how many tokens of
        it are. None: it is to be computed."""

    def smaller(self, task: T) -> Request | None:
        """The task's request with the next smaller beam width, or number of candidates, that it allows; None: none."""

    def too_large(self, task: T) -> RequestError:
        """Why no compiled program takes the task."""

    async def fetch(self, task: T, by_ns: int | None) -> None:
        """Fetch what the task waits for before it can run, such as features; `by_ns`: the latest time on the clock for
        it."""

    def begin(self, start: Start, tasks: Sequence[T]) -> Any:
        """The work that the executors are given for a run; `tasks` are those of `start.work`, in order."""

    def take(self, start: Start, tasks: Sequence[T | None], outcomes: Sequence[Any]) -> None:
        """Write the outcomes of a run into its tasks; a task is None where nobody waits for it any more."""

    def items(self, task: T) -> list[Item]:
        """The answer's items, once all work of the task is done. Raises for scores that are not finite."""

    def explain(self, task: T) -> list[Reuse]:
        """Where the parts of the prompt came from."""

    def explanation(self, task: T, answer: Answer) -> Explanation:
        """How the answer of a task, whose request is an ExplainRecommend or an ExplainRank, came about. Raises for
        scores that are no numbers."""

    def shadows(self, task: T) -> Sequence[tuple[T, Callable[[T], None]]]:
        """Tasks that compute again what was reused, and what is to be done with each when it has been computed."""

    def lost(self, request: Asked) -> None:
        """A request or a hint failed, its deadline passed, or it was refused for there was no time or no room."""

    def starting(self) -> None:
        """The warm-up is about to begin."""

    def started(self, handover_s: float = 0.0) -> None:
        """The warm-up has ended well. handover_s: seconds that a run costs beside its work, for its threads."""

    def close(self, idle: bool) -> None:
        """No request comes any more. idle: nothing is in flight. Called once or more often."""

    def join(self, timeout_s: float) -> bool:
        """After `close`: wait until what it holds is closed. False where the time ran out."""

    def check(self) -> None:
        """Audit; AssertionError."""


def make_ordering(config: Config) -> Ordering:
    """The order of the queue that is configured."""
    return Ordering(config.batching.order, round(config.server.patience_ms * 1e6))
