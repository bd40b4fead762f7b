"""What a kernel is run on, but for the numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """ends: of the groups, in rows, as the caller gives them. experts: of the groups; None: one each, in order.
    n, k: of a weight gradient's result. clusters: that the device runs at once.
    """

    name: str
    ends: tuple
    m: int
    n: int
    k: int
    clusters: int = 1
    dynamic: bool = False
    experts: tuple | None = None
