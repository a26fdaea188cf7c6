"""Row norms."""
