"""The simulated machine against queueing theory: customers come to an inbox, host loops serve them.

Mean waiting times (Kleinrock, Queueing Systems, volume 1), lambda the arrival rate, s the mean service
time, c servers, load rho = lambda s / c:

    M/M/1    rho s / (1 - rho)
    M/D/1    rho s / (2 (1 - rho))
    M/M/c    C(c, lambda s) s / (c (1 - rho)),   C: Erlang's probability that all servers are busy

Standard errors are by batch means: 20 batches of consecutive customers, after the first tenth of the run.
Customer by customer, waiting times must be those of the recursion of Kiefer and Wolfowitz (1955).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import factorial

import numpy as np
import pytest

from simcore import laws
from simcore.machine import Machine, Program
from simcore.ops import Graph, Op, Price, Size, Work
from simcore.sim import Simulation
from simcore.trace import Trace

BATCHES = 20
MOST_ERRORS = 4.0
SERVICE_S = 0.5
CUSTOMERS = {0.3: 4000, 0.6: 10000, 0.9: 10000}


@dataclass(frozen=True)
class Run:
    """Waiting times in the order of service, what was drawn, and what the machine noted."""

    waits: Sequence[float]
    gaps: Sequence[float]
    services: Sequence[float]
    trace: Trace

    def mean_and_error(self) -> tuple[float, float]:
        kept = np.array(self.waits[len(self.waits) // 10 :])
        means = kept[: len(kept) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
        return float(means.mean()), float(means.std(ddof=1) / np.sqrt(BATCHES))

    def errors_off(self, theory: float) -> float:
        """How many standard errors the mean waiting time is away from what theory says."""
        mean, error = self.mean_and_error()
        return abs(mean - theory) / error


@cache
def serve(load: float, servers: int, exponential: bool) -> Run:
    """Poisson arrivals to `servers` loops on one inbox, each with a stream of its own."""
    random = np.random.default_rng([round(load * 10), servers, exponential])
    customers = CUSTOMERS[load]
    gaps = random.exponential(gap_s(load, servers), customers)
    services = random.exponential(SERVICE_S, customers) if exponential else np.full(customers, SERVICE_S)
    times = services.tolist()
    serving = Graph("serve", (Op("serve", "serve", (("customer", Size("customer")),), "bf16", _nothing),))
    waits: list[float] = []

    def price(op: Op) -> Price:
        seconds = times[op["customer"]]
        return Price(seconds, seconds, seconds, "assumed", "drawn")

    def loop(m: Machine, number: int) -> Program:
        while (item := (yield m.recv("customers"))) is not None:
            customer, came_s = item
            waits.append(m.now() - came_s)
            yield m.wait(m.launch(serving, stream=f"server {number}", sizes={"customer": customer}))

    def program(m: Machine) -> Program:
        yield m.wait(*[m.spawn(loop(m, number)) for number in range(servers)])

    simulation = Simulation(price)
    arrivals = [(at_s, (i, at_s)) for i, at_s in enumerate(np.cumsum(gaps).tolist())]
    closing = [(arrivals[-1][0], None)] * servers
    simulation.feed(0, "customers", [*arrivals, *closing])
    trace = simulation.run(program)
    return Run(waits, gaps.tolist(), times, trace)


def gap_s(load: float, servers: int) -> float:
    """Mean time between arrivals."""
    return SERVICE_S / (servers * load)


def _nothing(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def waiting_s(load: float, servers: int, exponential: bool) -> float:
    """What theory says."""
    if not exponential:
        return load * SERVICE_S / (2.0 * (1.0 - load))
    offered = servers * load
    all_busy = offered**servers / factorial(servers) / (1.0 - load)
    erlang_c = all_busy / (sum(offered**k / factorial(k) for k in range(servers)) + all_busy)
    return erlang_c * SERVICE_S / (servers * (1.0 - load))


SYSTEMS = pytest.mark.parametrize(
    ("servers", "exponential"), [(1, True), (1, False), (3, True)], ids=["M/M/1", "M/D/1", "M/M/3"]
)


def test_formulas_are_those_of_the_books() -> None:
    """Erlang C of one server is its load; Kleinrock's M/D/1 waits half as long as M/M/1; M/M/3 at an
    offered load of 2 finds all servers busy with probability 4/9."""
    assert waiting_s(0.9, 1, True) == pytest.approx(0.9 * SERVICE_S / 0.1)
    assert waiting_s(0.6, 1, False) == pytest.approx(waiting_s(0.6, 1, True) / 2)
    assert waiting_s(2 / 3, 3, True) == pytest.approx(4 / 9 * SERVICE_S)


@SYSTEMS
@pytest.mark.parametrize("load", list(CUSTOMERS))
def test_mean_waiting_time_is_within_four_standard_errors(
    load: float, servers: int, exponential: bool
) -> None:
    run = serve(load, servers, exponential)
    assert run.errors_off(waiting_s(load, servers, exponential)) <= MOST_ERRORS


def recursion(servers: int, gaps: Sequence[float], services: Sequence[float]) -> list[float]:
    """Waiting times where, in order of arrival, a customer is served by the server that is free first."""
    free, now, waits = [0.0] * servers, 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        now += gap
        start = max(now, min(free))
        free[free.index(min(free))] = start + service
        waits.append(start - now)
    return waits


@SYSTEMS
@pytest.mark.parametrize("load", list(CUSTOMERS))
def test_every_customer_waits_as_the_recursion_says(load: float, servers: int, exponential: bool) -> None:
    run = serve(load, servers, exponential)
    expected = recursion(servers, run.gaps, run.services)
    assert np.allclose(run.waits, expected, rtol=0.0, atol=1e-9 * run.trace.end_s)


@SYSTEMS
def test_a_service_that_is_a_tenth_longer_is_found_out(servers: int, exponential: bool) -> None:
    """So the three loads together have power: the same customers, served 10 % slower, are off by more
    than four standard errors at one of them at least."""
    off = []
    for load in CUSTOMERS:
        run = serve(load, servers, exponential)
        slower = recursion(servers, run.gaps, [1.1 * service for service in run.services])
        off.append(replace(run, waits=slower).errors_off(waiting_s(load, servers, exponential)))
    assert max(off) > MOST_ERRORS


@SYSTEMS
@pytest.mark.parametrize("load", list(CUSTOMERS))
def test_littles_law_holds_in_the_run(load: float, servers: int, exponential: bool) -> None:
    """The area under the queue's length, swept over the inbox's log, is what the loops saw waited; the
    time that streams were busy is what was served."""
    run = serve(load, servers, exponential)
    served = [m for m in run.trace.messages if m.received_s is not None][: len(run.waits)]
    events = sorted([(m.arrived_s, 1) for m in served] + [(m.received_s or 0.0, -1) for m in served])
    times, steps = np.array([t for t, _ in events]), np.cumsum([step for _, step in events])
    area = float((np.diff(times) * steps[:-1]).sum())
    duration = run.trace.end_s
    rate, length = len(run.waits) / duration, area / duration
    assert length == pytest.approx(rate * np.mean(run.waits), rel=1e-9)
    busy = sum(span.end_s - span.start_s for span in run.trace.spans)
    assert busy == pytest.approx(sum(run.services), rel=1e-9)
    assert len(run.trace.spans) == len(run.waits) == CUSTOMERS[load]


@SYSTEMS
def test_laws_hold_and_customers_are_served_in_order(servers: int, exponential: bool) -> None:
    assert laws.violations(serve(0.6, servers, exponential).trace) == {}
