"""How the embedding service is put under load, measured and shown."""
