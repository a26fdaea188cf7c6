"""Who owns a device: the device in this process, a device pool of them, and rank groups that decide alike.

This folder is `layerzero.actors`.  Under its bare folder name it would be a second copy of every class in
it, so that import is refused.
"""

if __name__ != "layerzero.actors":
    raise ImportError("import layerzero.actors, not the top-level folder `actors`")
