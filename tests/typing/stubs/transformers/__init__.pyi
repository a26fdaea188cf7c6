"""Whatever is asked of transformers: its own names lead a checker through the files of all its models."""

from typing import Any

def __getattr__(name: str) -> Any: ...
