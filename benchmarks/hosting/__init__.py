"""Two hosts in this machine: network namespaces, and a cable between them that delays, loses and is cut."""
