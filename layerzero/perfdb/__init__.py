"""What was measured, where and how: rows of kernel times that outlive the process, and the tables we ship.

`record` says what a measurement is, `store` keeps them in SQLite with one writer, `shipped` reads the tables
that come with the package; both are imported where they are used, since SQLite and anyio are not free.
Nothing here is read by a call: a device gets a snapshot in memory.
"""

from layerzero.perfdb.record import BenchmarkCase as BenchmarkCase
from layerzero.perfdb.record import Environment as Environment
from layerzero.perfdb.record import Measurement as Measurement
from layerzero.perfdb.record import implausible_reason as implausible_reason
from layerzero.perfdb.record import versions_of as versions_of
