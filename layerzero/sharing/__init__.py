"""Work that one process does for all that ask the same: files and locks on a host, leases in a cluster"""
