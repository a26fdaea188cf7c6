"""placeholder"""
from benchmarks.hosting.namespaces import Hosts, cut, mend, why_not
