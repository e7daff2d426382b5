"""The simulated machine against queueing theory: customers come to an inbox, host loops serve them.

Mean waiting times (Kleinrock, Queueing Systems, volume 1), lambda the arrival rate, s the mean service
time, c servers, load rho = lambda s / c:

    M/M/1    rho s / (1 - rho)
    M/D/1    rho s / (2 (1 - rho))
    M/M/c    C(c, lambda s) s / (c (1 - rho)),   C: Erlang's probability that all servers are busy

Customer by customer, waiting times must be those of the recursion of Kiefer and Wolfowitz (1955); its
independent replications, of as many customers as the run has, give the standard error of the run's mean
(batch means would make it too small: at a load of 0.9 batches of this length still know of each other).
Means leave out the first tenth of a run, which starts empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import factorial

import numpy as np
import pytest

from simcore.machine import laws
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.ops.op import Graph, Op, Price, Size, Work
from simcore.sim.simulation import Simulation
from tests.thorough import first, slow

REPLICATIONS = 200
MOST_ERRORS = 4.0
SERVICE_S = 0.5
CUSTOMERS = {0.3: 3000, 0.6: 4000, 0.9: 6000}


@dataclass(frozen=True)
class Run:
    """Waiting times in the order of service, what was drawn, and what the machine noted."""

    waits: Sequence[float]
    gaps: Sequence[float]
    services: Sequence[float]
    trace: Trace


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


Waits = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def recursion(servers: int, gaps: Waits, services: Waits) -> Waits:
    """Waiting times [customers, replications]: in order of arrival, a customer is served by the server that
    is free first. `left` is what each server still has to do, the least first."""
    left = np.zeros((servers, gaps.shape[1]))
    waits = np.empty_like(gaps)
    for i, (gap, service) in enumerate(zip(gaps, services, strict=True)):
        left = np.maximum(left - gap, 0.0)
        waits[i] = left[0]
        left[0] += service
        left.sort(axis=0)
    return waits


def mean_wait(waits: Waits) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Mean waiting time of each replication, the first tenth of its customers left out."""
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = waits[len(waits) // 10 :].mean(axis=0)
    return means


@cache
def replications(load: float, servers: int, exponential: bool, slower: float = 1.0) -> tuple[float, float]:
    """Mean of the mean waiting times of independent replications, and the standard error of one."""
    random = np.random.default_rng([round(load * 10), servers, exponential, 1])
    size = (CUSTOMERS[load], REPLICATIONS)
    gaps = random.exponential(gap_s(load, servers), size)
    services = random.exponential(SERVICE_S, size) if exponential else np.full(size, SERVICE_S)
    means = mean_wait(recursion(servers, gaps, slower * services))
    return float(means.mean()), float(means.std(ddof=1))


def column(figures: Sequence[float]) -> Waits:
    return np.array(figures)[:, None]


@SYSTEMS
@pytest.mark.parametrize("load", first(1, CUSTOMERS))
def test_mean_waiting_time_is_within_four_standard_errors(
    load: float, servers: int, exponential: bool
) -> None:
    run = serve(load, servers, exponential)
    _, error = replications(load, servers, exponential)
    mean = float(mean_wait(column(run.waits))[0])
    assert abs(mean - waiting_s(load, servers, exponential)) <= MOST_ERRORS * error


@SYSTEMS
@pytest.mark.parametrize("load", first(1, CUSTOMERS))
def test_every_customer_waits_as_the_recursion_says(load: float, servers: int, exponential: bool) -> None:
    run = serve(load, servers, exponential)
    services = column(run.services)
    expected = recursion(servers, column(run.gaps), services)[:, 0]
    assert np.allclose(run.waits, expected, rtol=0.0, atol=1e-9 * run.trace.end_s)
    slower = recursion(servers, column(run.gaps), 1.1 * services)[:, 0]
    assert not np.allclose(run.waits, slower, rtol=0.0, atol=1e-3)


@SYSTEMS
@pytest.mark.parametrize("load", first(1, CUSTOMERS))
def test_the_recursion_meets_theory_and_a_tenth_longer_service_does_not(
    load: float, servers: int, exponential: bool
) -> None:
    """Within four standard errors of the mean of all replications; served 10 % slower, it is off by more."""
    theory = waiting_s(load, servers, exponential)
    for slower in (1.0, 1.1):
        mean, error = replications(load, servers, exponential, slower)
        within = abs(mean - theory) <= MOST_ERRORS * error / np.sqrt(REPLICATIONS)
        assert within == (slower == 1.0)


@SYSTEMS
@pytest.mark.parametrize("load", first(1, CUSTOMERS))
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


@slow
@SYSTEMS
def test_laws_hold_and_customers_are_served_in_order(servers: int, exponential: bool) -> None:
    assert laws.violations(serve(0.6, servers, exponential).trace) == {}
