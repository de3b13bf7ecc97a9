"""The load that a policy carries: how far its goodput stays at a level while requests come faster."""

from collections.abc import Sequence

CARRIED_GOODPUT = 0.90
"""The level of published comparisons of loads."""


def carried_load(loads: Sequence[float], goodput: Sequence[float], level: float = CARRIED_GOODPUT) -> float | None:
    """The first load (of ascending ones) at which goodput falls through the level, linear between the two around it.

    None where it does not fall through it between the first and the last load.
    """
    if not loads or goodput[0] < level:
        return None
    for k in range(1, len(loads)):
        if goodput[k] < level:
            above, below = goodput[k - 1], goodput[k]
            return loads[k - 1] + (loads[k] - loads[k - 1]) * (above - level) / (above - below)
    return None
