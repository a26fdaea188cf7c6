"""The public functions: thin, each one a request to the runtime of the calling context."""
