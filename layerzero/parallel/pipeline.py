"""Stages of a pipeline behind each other: as many batches under way as there are stages.

Rank 0 decides, as in every rank group: it forms the batches, and one step message says each to every rank.
Its part of a step ends when it has passed its rows on, and the next batch begins; what the last stage gives
comes back on a thread of its own, and its callers wait for that alone. A caller joins the batch that fewest
callers are in, so that those who decode keep to as many batches as there are stages, and no stage waits for
the others longer than they differ. Every stage takes the steps in the order of their messages.

Source: micro-batches that follow each other without a flush, arXiv 1806.03377, section 3.2.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.calls.functions import split_rows, takes_counts
from layerzero.parallel.layout import Layout
from layerzero.scheduler.core.pending_call import LateResults
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.spec.errors import ConfigurationError, DeviceLostError

StageFunction = Callable[..., Tensor]
Finish = Callable[..., Any]


@dataclass(slots=True)
class StageStats:
    """What a stage has done: steps, seconds inside its function, bytes that it passed on.

    On a GPU the seconds are those of the launches.
    """

    steps: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Function:
    """A stage's function and what passes it, see `Pipeline.batched`; all but `carries` take `counts`."""

    name: str
    run: StageFunction
    carries: Callable[[int], Tensor]
    returns: Callable[..., Tensor]
    finish: Finish


@dataclass(eq=False)
class Pipeline:
    """The stages of a `Layout`, on one of its ranks; every rank makes one, and gives it the same functions.

    `batches` of a function are under way at once, by default as many as there are stages; one more hides the
    time that rank 0's host takes between a result and the step after it. `stats` counts what this rank does.
    Raises: ConfigurationError: `batches` is below 1.
    """

    layout: Layout
    batches: int = 0
    stats: StageStats = field(default_factory=StageStats)

    def __post_init__(self) -> None:
        layout = self.layout
        if self.batches < 0:
            raise ConfigurationError(f"batches needs at least 1, or 0 for one a stage, got {self.batches}")
        self.batches = self.batches or layout.stages
        self._late: dict[LateResults, None] = {}  # of the steps on their way through the stages
        self._sends: deque[tuple[Any, Tensor]] = deque()  # with what they read
        self._posted: deque[tuple[Any, Tensor]] = deque()  # what the next steps receive, in their order
        self._callers: Counter[Any] = Counter()  # by the driver of their loop
        self._returns = Worker("layerzero-pipeline")
        self._stream: Any = None  # of the results that come back, where they do on a GPU
        self._lost: Exception | None = None
        layout.member.group.when_failed(self._fail)

    def batched(
        self,
        fn: StageFunction,
        *,
        name: str,
        carries: Callable[[int], Tensor],
        returns: Callable[..., Tensor],
        finish: Finish | None = None,
        unsent: Sequence[str] = (),
    ) -> Callable[..., Awaitable[Any]]:
        """`member.batched` for a function of stages: `await step(request, *args)`, on rank 0.

        `fn(x, *columns)` runs on every rank; `x` is what the stage before returned, None on the first one. It
        returns rows for the next stage or, on the last, the results. `carries(rows)` makes an empty tensor as
        a stage passes it on for so many rows of all callers, `returns(*columns, counts=...)` one as the last
        stage returns it: a row, or as many as they brought, for each caller. Results come back through the
        hosts, and go to the device of that tensor: tokens are best left on the CPU.
        `finish(results, *columns)` runs on rank 0 where they come back, before the callers have them. Both,
        and `fn`, take `counts`, the rows of each caller, where they name it. `unsent` is `member.batched`'s.
        Raises: ConfigurationError: another function has the name. ValueError: `unsent` names no parameter.
            When awaited: DeviceLostError: a rank is gone, and with it what was under way. ValueError: the
            request is under way already.
        """
        parameters = list(inspect.signature(fn).parameters.values())
        finish = finish or (lambda results, *columns: results)
        function = _Function(name, _counting(fn), carries, _counting(returns), _counting(finish))

        def on_stage(*columns: Any, counts: list[int]) -> Any:
            return self._step(function, columns, counts)

        rest = [p for p in parameters[1:] if p.name != "counts"]
        counted = inspect.Parameter("counts", inspect.Parameter.KEYWORD_ONLY)
        on_stage.__signature__ = inspect.Signature([*rest, counted])  # type: ignore[attr-defined]
        member = self.layout.member
        device = member.group.device
        assert isinstance(device, ScheduledDevice)  # of a runtime
        on_cpu = device.device.type == "cpu"
        # A sender over gloo waits for who has not posted. On a GPU the host launches ahead by itself.
        posts = not self.layout.first and on_cpu
        prepare = (lambda counts: self._post(function, counts)) if posts else None
        launch = member.batched(
            on_stage, name=name, alike=False, unsent=unsent, prepare=prepare, batches=self.batches
        )
        if not on_cpu:
            return launch

        async def step(request: int | str, *args: Any, **options: Any) -> Any:
            driver = device.loop_drivers.current()
            self._count_caller(device, driver, 1)
            try:
                return await launch(request, *args, **options)
            finally:
                self._count_caller(device, driver, -1)

        return step

    # -- what every rank runs -----------------------------------------------------------------------

    def _step(self, function: _Function, columns: Sequence[Any], counts: list[int]) -> list[Any]:
        """This stage's part of a step; on rank 0 what each caller gets, or what will bring it."""
        layout = self.layout
        x = None
        if not layout.first:
            if not self._posted:
                self._post(function, counts)
            receive, x = self._posted.popleft()
            receive.wait()
        began_s = time.perf_counter()
        out = function.run(x, *columns, counts=counts)
        self.stats.busy_s += time.perf_counter() - began_s
        self.stats.steps += 1
        if not layout.last:
            _need_like("carries", out, function.carries(sum(counts)), function.name)
            self._send(out, layout.chain, layout.stage + 1)
        elif layout.stages > 1 and layout.tensor.rank == 0:
            _need_like("returns", out, function.returns(*columns, counts=counts), function.name)
            self._send_back(out, function.name)
        if layout.member.rank:
            return [None] * len(counts)
        return self._launched(function, columns, counts, out)

    def _post(self, function: _Function, counts: list[int]) -> None:
        """Take in what the stage before passes on in a step: at once when it comes, whatever runs here."""
        layout = self.layout
        x = function.carries(sum(counts))
        work = dist.irecv(x, group=layout.chain, group_src=layout.stage - 1)
        self._posted.append((work, x))

    def _send(self, tensor: Tensor, group: Any, to: int) -> None:
        """Pass `tensor` on without waiting for who takes it."""
        tensor = tensor.contiguous()
        self._sends.append((dist.isend(tensor, group=group, group_dst=to), tensor))
        self.stats.sent_bytes += tensor.nbytes
        while len(self._sends) > 2 * self.batches:  # so many steps back every stage has taken it
            self._sends.popleft()[0].wait()

    def _send_back(self, out: Tensor, name: str) -> None:
        """Give results to rank 0's host: from a GPU by a copy that the next launches do not wait for."""
        if not out.is_cuda:
            self._send(out, self.layout.returning, 0)
            return
        copied, rows = torch.cuda.Event(blocking=True), _on_host(out)
        rows.copy_(out, non_blocking=True)
        copied.record()

        def send() -> None:
            try:
                copied.synchronize()
                self._send(rows, self.layout.returning, 0)
            except RuntimeError as error:
                self.layout.member.group.fail(f"results of {name} did not come back: {error}"[:300])

        self._returns.submit(send)

    # -- what rank 0 runs ---------------------------------------------------------------------------

    def _count_caller(self, device: ScheduledDevice, driver: Any, change: int) -> None:
        """While a loop has callers here, its next batch is formed while one computes on rank 0's host.

        A GPU's next launches are ahead of it anyway, and none is counted.
        """
        self._callers[driver] += change
        if self._callers[driver] == max(change, 0):  # the first has come, or the last has gone
            device.loop_drivers.allow_inflight(driver, 2 if change > 0 else 1)
        if not self._callers[driver]:
            del self._callers[driver]

    def _launched(
        self, function: _Function, columns: Sequence[Any], counts: list[int], out: Tensor
    ) -> list[Any]:
        if self.layout.stages == 1:
            return split_rows(function.name, function.finish(out, *columns, counts=counts), counts)
        late = LateResults(len(counts))
        self._late[late] = None  # before the loss is looked for: what is lost later ends it
        if self._lost is not None:
            self._end(late, [], self._lost)
            return [late] * len(counts)
        like = function.returns(*columns, counts=counts)
        rows = _on_host(like)
        first_of_last = self.layout.member.ranks - self.layout.tensor.ranks
        receive = dist.irecv(rows, group=self.layout.returning, group_src=first_of_last)
        self._returns.submit(
            lambda: self._return(late, function, columns, counts, receive, rows, like.device)
        )
        return [late] * len(counts)

    def _return(
        self,
        late: LateResults,
        function: _Function,
        columns: Sequence[Any],
        counts: list[int],
        receive: Any,
        rows: Tensor,
        device: torch.device,
    ) -> None:
        """On the thread of the results: take a step's in, the steps in order."""
        results: list[Any] = []
        error: Exception | None = None
        try:
            self._wait_for(receive, function.name)
            with self._finishing():
                finished = function.finish(rows.to(device, non_blocking=True), *columns, counts=counts)
                if self._stream is not None:
                    self._stream.synchronize()
                results = split_rows(function.name, finished, counts)
        except Exception as raised:
            error = raised
        self._end(late, results, error)

    def _end(self, late: LateResults, results: list[Any], error: Exception | None) -> None:
        self._late.pop(late, None)
        late.end(results, error)

    def _wait_for(self, receive: Any, name: str) -> None:
        """Wait for what the last stage gives of a step.

        Raises: DeviceLostError: nothing came, and nothing will: the next results would be another step's.
        """
        group = self.layout.member.group
        try:
            receive.wait()
        except RuntimeError as error:
            why = group.failure_reason() or f"the last stage gave nothing of {name}: {error}"[:300]
            group.fail(why)
            raise _lost(why) from error

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """A block for results that have come back: on their stream, where rank 0's device is a GPU."""
        device = self.layout.member.group.device
        if device.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device.device)
        with torch.cuda.stream(self._stream), torch.inference_mode(device.settings.inference is not False):
            yield

    def _fail(self, why: str) -> None:
        """The rank group has failed: no result comes any more, and none is waited for."""
        self._lost = _lost(why)
        for late in list(self._late):
            self._end(late, [], self._lost)


def _lost(why: str) -> DeviceLostError:
    return DeviceLostError(f"the rank group failed while a step was in its stages: {why}", retryable=False)


def _on_host(like: Tensor) -> Tensor:
    """An empty tensor of the CPU with the shape and type of `like`, which a GPU copies to without a stop."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _counting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which may be given `counts` also where it does not take them."""
    return fn if takes_counts(fn) else lambda *columns, counts: fn(*columns)


def _need_like(argument: str, out: Tensor, like: Tensor, name: str) -> None:
    if out.shape != like.shape or out.dtype != like.dtype:
        raise ValueError(
            f"{argument} needs a tensor as {name} returns it, {out.dtype} {tuple(out.shape)}, got "
            f"{like.dtype} {tuple(like.shape)}"
        )
