"""Real processes for tests: the `ranks` fixture runs one function on each rank and returns what
each rank returned.

`pool` keeps eight processes for the whole session; `fresh` starts new ones for bodies that die;
`launched` uses the processes that torchrun started. `process` is what runs inside a rank, `devices`
says on which GPU. `waiting` is for bodies that must not talk.
"""

from tests.ranks.fresh import Outcome
from tests.ranks.process import RankContext

__all__ = ["Outcome", "RankContext"]
