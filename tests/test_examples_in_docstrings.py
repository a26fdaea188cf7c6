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
    printed: list[str] = []
    for example in finder.find(module):
        runner.run(example, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)
    assert runner.tries > 0


def test_examples_are_there() -> None:
    """At least twenty functions and classes show one, those that a newcomer reads first among them."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {
        example.name.rpartition(".")[2]
        for name in SHOWN
        for example in finder.find(importlib.import_module(name))
        if example.examples
    }
    assert len(names) >= 20
    first = {"start", "select", "explain", "lock", "bind", "batched", "configure", "Settings", "PagedCache"}
    assert first - names == set()
