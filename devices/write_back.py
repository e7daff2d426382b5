"""What a graph's next op waits for: states that an op has changed and left in the L2 cache.

    write_back_s  =  min(bytes of changed states, STAYS l2_bytes) / hbm_bytes_per_s

A cache writes back what has changed when others need the room, here the weights that the next product reads.
In measurements of ops alone the same op comes next, which has time for that beside its own work: 16 states of
32 heads of 128 by 128, 64 MiB read and written, take 20 us on an H200, whose memory needs 14. What ops leave
besides states is small, or read by the next op anyhow (docs/measurements/real_machines.md).
"""

from simcore.devices.price import STAYS
from simcore.devices.spec import DeviceSpec
from simcore.ops.linear_layer import DECODE, state_bytes
from simcore.ops.op import Op


def write_back_s(spec: DeviceSpec, op: Op) -> float:
    """Returns the seconds by which an op makes the next one of its graph longer."""
    if op.kind != DECODE:
        return 0.0
    changed = op["batch"] * state_bytes(op["heads"], op["rank"], op["dim"])
    return min(changed, STAYS * spec.l2_bytes) / spec.hbm_bytes_per_s
