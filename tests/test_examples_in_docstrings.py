"""The examples in docstrings run, each as it stands, and print what they say."""

import doctest
import importlib

import pytest

from scripts import house

SHOWN = [module.name for module in house.modules() if ">>> " in module.text]


@pytest.mark.parametrize("name", SHOWN)
def test_examples_run(name: str) -> None:
    """Every example of the module, each in a copy of its names."""
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    told: list[str] = []
    for example in finder.find(module):
        runner.run(example, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
    assert runner.tries > 0


def test_examples_are_there() -> None:
    """A module that shows one is found."""
    assert "layerzero.spec.settings" in SHOWN
