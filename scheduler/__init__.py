"""What runs when: single flight, batchers, batching and the order in which waiting calls are served.

This folder is `layerzero.scheduler`.  Under its bare folder name it would be a second copy of every class in
it, so that import is refused.
"""

if __name__ != "layerzero.scheduler":
    raise ImportError("import layerzero.scheduler, not the top-level folder `scheduler`")
