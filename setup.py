"""Builds the compiled parts, which are optional: without a compiler the package installs too.

What is compiled here has a twin in torch or numpy that gives the same results, and `asyncmoe
doctor` says which of the two runs.
"""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

SOURCES = Path("asyncmoe/native/src")


def extension(name: str, *flags: str) -> Pybind11Extension:
    """The module `asyncmoe.native._<name>`, of all sources in its folder; `flags` for the compiler
    beside the usual ones."""
    folder = SOURCES / name
    return Pybind11Extension(
        f"asyncmoe.native._{name}",
        sorted(str(path) for path in folder.glob("*.cpp")),
        depends=sorted(str(path) for path in folder.glob("*.h")),
        cxx_std=17,
        extra_compile_args=[
            "-O3",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-Wno-psabi",
            "-pthread",
            *flags,
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )


ParallelCompile("ASYNCMOE_BUILD_JOBS", default=0).install()
# Virtual time is added up as Python does it, so that a seed gives the same run on any machine.
setup(ext_modules=[extension("kernels"), extension("columns", "-ffp-contract=off")])
