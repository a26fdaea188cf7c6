"""The compiled part; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[Extension("acme_layerzero._gate", ["src/acme_layerzero/gate.c"], extra_compile_args=["-O3"])]
)
