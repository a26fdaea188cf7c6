"""How a public function runs: blocking, awaited, bound or batched."""
