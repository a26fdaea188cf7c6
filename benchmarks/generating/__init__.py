"""Generation under load: one model in LayerZero's three granularities, by hand, and behind other servers."""
