"""The torch that this package needs, checked before anything of the package is imported."""

import re

import torch

TORCH_MIN = "2.11"


def need_torch(version: str) -> None:
    """Refuse a torch whose first two numbers are below `TORCH_MIN`; builds of 2.11 itself count as 2.11.

    Raises: ImportError: naming what is needed, what is there and the command that changes it.
    """
    numbers = [tuple(int(n) for n in re.findall(r"\d+", text)[:2]) for text in (version, TORCH_MIN)]
    if numbers[0] < numbers[1]:
        raise ImportError(
            f"layerzero needs torch>={TORCH_MIN}, got {version}: pip install --upgrade 'torch>={TORCH_MIN}'",
            name="torch",
        )


need_torch(str(torch.__version__))
