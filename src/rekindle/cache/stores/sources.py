"""Which of the places that hold an entry is asked for it: the cheapest one."""

from rekindle.cache.index import Where
from rekindle.generation.events import CacheSource

# Disk before shared even when both hold it: a local read cannot stall on the network.
CHEAPEST_FIRST = (
    (CacheSource.MEMORY, Where.MEMORY),
    (CacheSource.DISK, Where.DISK),
    (CacheSource.SHARED, Where.SHARED),
)


def nearest(where: Where) -> CacheSource:
    """Of an entry that has just left: memory, where it was; whoever wants it finds out."""
    holders = (source for source, place in CHEAPEST_FIRST if place in where)
    return next(holders, CacheSource.MEMORY)
