"""Inside a forward: the calls and assignments of a Python function as locations.

In a step in which a block may ask for them, the function runs as a copy whose operations are
handed over one by one; the copy is compiled once and the function itself is never changed.
"""

from midstream.interleaving.source.calls import Sources
from midstream.interleaving.source.nodes import Operation, Source, find_source

__all__ = ["Operation", "Source", "Sources", "find_source"]
