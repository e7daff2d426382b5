"""What random programs and small servers leave behind, as one digest: compiled core and sources must agree.

python -m tests.digests [--compiled] [--count 100]
"""

import argparse
import hashlib
import re
from importlib.machinery import EXTENSION_SUFFIXES
from random import Random

from simcore import compiled


def digest_of(count: int) -> str:
    """Of so many programs noted as spans, host loops noted as rows, and workloads of continuous batching."""
    # Imported here: what is compiled has to be known before.
    from tests.programs import read_program  # noqa: PLC0415
    from tests.reference_batching import random_workload, strategy  # noqa: PLC0415
    from tests.test_rows import hosts_of  # noqa: PLC0415

    found = hashlib.sha256()
    for seed in range(count):
        trace = read_program(Random(seed).randbytes(160)).simulate()
        left = repr((trace.spans, trace.messages, trace.gauges, trace.marks))
        # Where a function lies in memory is another thing in each process.
        found.update(re.sub(" at 0x[0-9a-f]+", "", left).encode())
        found.update(repr(hosts_of(seed)).encode())
        found.update(repr(strategy(*random_workload(seed))).encode())
    return found.hexdigest()


def main() -> None:
    """Prints the digest, and who made it."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    if given.compiled:
        compiled.use()
    took = compiled.in_use()
    if given.compiled and not took:
        parser.error("the core is not compiled")
    digest = digest_of(given.count)
    from simcore.sim import simulation as sim  # noqa: PLC0415

    assert sim.__file__.endswith(tuple(EXTENSION_SUFFIXES)) == took
    print("compiled" if took else "sources", digest)


if __name__ == "__main__":
    main()
