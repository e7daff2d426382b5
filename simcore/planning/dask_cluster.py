"""Runs made by the workers of a Dask cluster; `remote_runs` says what each of them does.

The cluster keeps a run until a worker has made it: where a worker dies, another one makes it. What is
finished is handed over at once, so that it is kept whatever comes later.
"""

import logging
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from simcore.input.files import InputError, one_line, plain
from simcore.planning.remote_runs import Gave, basis, common, differs, from_plain, piece
from simcore.planning.runs import Ask, Finished, settle

ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):(\d{1,5})")
MOST_PORT = 65_535
# How long a scheduler, a first worker, and one in place of all that died may take to answer.
CONNECT_S, FIRST_S, LOST_S = 5.0, 10.0, 30.0
# So many runs that a cluster has lost are asked for again before it counts as gone.
MOST_AGAIN = 100
# How often a plan that waits for runs looks whether the cluster is still there.
LOOK_S = 1.0


class OnDask:
    """Makes runs on the workers of a scheduler, at once as many as there are workers."""

    def __init__(self, address: str) -> None:
        self._where = f"--dask {plain(address)}"
        self._plan = uuid.uuid4().hex
        self._client = _connected(address, self._where)
        # By the identity of the hardware: it, and its common part as a task that a worker makes.
        self._common: dict[int, tuple[Any, Any]] = {}
        self._number = 0
        try:
            self._workers = self._checked()
        except BaseException:
            self._client.close(timeout=CONNECT_S)
            raise

    def make(self, asks: Sequence[Ask], finished: Finished) -> None:
        """See `Maker`. Raises InputError if a worker cannot make a run as it is made here, or if the cluster
        is gone."""
        done: SimpleQueue[Any] = SimpleQueue()
        waiting: dict[str, tuple[int, Any]] = {}
        try:
            for i in range(len(asks)):
                self._submit(i, asks[i], waiting, done)
            self._collect(asks, waiting, done, finished)
        except BaseException:
            self._end([future for _, future in waiting.values()])
            raise

    def _submit(
        self, i: int, ask: Ask, waiting: dict[str, tuple[int, Any]], done: "SimpleQueue[Any]"
    ) -> None:
        settle(ask)
        self._number += 1
        name = f"simcore-{self._plan}-{self._number}"
        shared, sent = self._shared(ask), self._sent(ask)
        future = self._client.submit(_by_value(), shared, sent, key=name, pure=False)
        waiting[name] = (i, future)
        future.add_done_callback(done.put)

    def _collect(
        self,
        asks: Sequence[Ask],
        waiting: dict[str, tuple[int, Any]],
        done: "SimpleQueue[Any]",
        finished: Finished,
    ) -> None:
        alone_s, again = 0.0, 0
        while waiting:
            try:
                future = done.get(timeout=LOOK_S)
            except Empty:
                alone_s = self._look(alone_s)
                continue
            alone_s = 0.0
            i, _ = waiting.pop(future.key)
            if future.status in ("cancelled", "lost") and again < MOST_AGAIN:
                # A worker may die with what it has made before the scheduler has told of it.
                self._look(alone_s)
                again += 1
                self._common.clear()
                self._submit(i, asks[i], waiting, done)
                continue
            gave = self._result(future)
            asks[i].point.bench.take_over(from_plain(gave.prices))
            assert gave.ran is not None
            finished(i, gave.ran)

    def close(self) -> None:
        """See `Maker`."""
        with suppress(Exception):
            self._client.close(timeout=CONNECT_S)

    def about(self) -> str:
        """See `Maker`."""
        return f"Dask, {self._workers} workers"

    def _shared(self, ask: Ask) -> Any:
        """Returns the common part of a run, as a task: a worker keeps it for others, and it is made again
        where that worker dies."""
        hardware = ask.point.bench.hardware
        if id(hardware) not in self._common:
            self._number += 1
            name = f"simcore-{self._plan}-common-{self._number}"
            future = self._client.submit(bytes, common(ask.point), key=name, pure=False)
            self._common[id(hardware)] = (hardware, future)
        return self._common[id(hardware)][1]

    def _sent(self, ask: Ask) -> bytes:
        try:
            return piece(self._plan, ask)
        except OSError as error:
            raise InputError(f"{self._where}: {error.filename}: {error.strerror}") from None

    def _result(self, future: Any) -> Gave:
        if future.status in ("cancelled", "lost"):
            raise InputError(f"{self._where}: the scheduler is gone; what is finished is kept")
        try:
            gave = Gave(*future.result())
        except Exception as error:
            if type(error).__name__ == "KilledWorker":
                says = "each worker that made a run died, perhaps for want of memory"
                raise InputError(f"{self._where}: {says}; what is finished is kept") from None
            raise
        if gave.refused:
            raise InputError(f"{self._where}: a worker {gave.refused}")
        return gave

    def _look(self, alone_s: float) -> float:
        """Returns for how long there has been no worker. Raises InputError if that is too long, or there is
        no scheduler."""
        if self._client.status != "running":
            raise InputError(f"{self._where}: the scheduler is gone; what is finished is kept")
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            return 0.0
        if alone_s > LOST_S:
            raise InputError(f"{self._where}: no worker is left; what is finished is kept")
        return alone_s + LOOK_S

    def _checked(self) -> int:
        """Returns how many workers there are. Raises InputError if there is none, or one cannot make runs as
        they are made here."""
        try:
            self._client.wait_for_workers(1, timeout=FIRST_S)
        except TimeoutError:
            raise InputError(f"{self._where}: the scheduler has no worker") from None
        try:
            found = self._client.run(_asked())
        except Exception as error:
            says = f"{type(error).__name__}: {plain(error, 120)}"
            raise InputError(f"{self._where}: a worker does not answer ({one_line(says)})") from None
        ours = basis()
        for worker, theirs in found.items():
            why = theirs if isinstance(theirs, str) else differs(theirs, ours)
            if why:
                raise InputError(f"{self._where}: worker {worker} {why}")
        return len(found)

    def _end(self, futures: Sequence[Any]) -> None:
        """Forgets the runs that wait, and ends those that are under way."""
        if futures and self._client.status == "running":
            with suppress(Exception):
                self._client.cancel(futures, force=True)
                self._client.run(_ending(), self._plan)


def _connected(address: str, where: str) -> Any:
    """Returns a client of a scheduler. Raises InputError if there is none, or Dask is not installed."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) <= MOST_PORT:
        raise InputError(f"{where}: is no address; tcp://HOST:PORT of a Dask scheduler is needed")
    try:
        from distributed import Client  # noqa: PLC0415
    except ImportError:
        raise InputError(f"{where}: Dask is not installed: pip install 'simcore[dask]'") from None
    # What is wrong is said in one line here.
    logging.getLogger("distributed").handlers.clear()
    try:
        return Client(address, timeout=CONNECT_S, set_as_default=False, name="simcore-plan")
    except (OSError, ValueError, RuntimeError, TimeoutError):
        raise InputError(f"{where}: no scheduler answers there within {CONNECT_S:g} s") from None


# Functions within functions are sent as they are, by value: a worker without simcore can say so, and the
# compiled core is chosen before a module of it is imported.


def _by_value() -> Callable[[bytes, bytes], tuple[Any, ...]]:
    def work(shared: bytes, sent: bytes) -> tuple[Any, ...]:
        from simcore import compiled  # noqa: PLC0415

        if not compiled.imported():
            compiled.use()
        from simcore.planning.remote_runs import make  # noqa: PLC0415

        return tuple(make(shared, sent))

    return work


def _asked() -> Callable[[], dict[str, str] | str]:
    def about() -> dict[str, str] | str:
        try:
            from simcore import compiled  # noqa: PLC0415

            if not compiled.imported():
                compiled.use()
            from simcore.planning.remote_runs import basis  # noqa: PLC0415
        except ModuleNotFoundError as error:
            here = (error.name or "").partition(".")[0] == "simcore"
            return "has no simcore, or an older one" if here else f"lacks the package {error.name}"
        return basis()

    return about


def _ending() -> Callable[[str], None]:
    def ended(plan: str) -> None:
        from simcore.planning.remote_runs import end  # noqa: PLC0415

        end(plan)

    return ended
