# SPDX-License-Identifier: BSD-3-Clause
"""Whether the torch that runs is the one the binary was compiled for: asked before the binary is loaded.

The layout of c10d's classes changes between minor releases, so that a wrong pair may load and then call the wrong functions.
"""


def require_torch(compiled, running):
    minor = compiled.split("+")[0].split(".")[:2]
    if running.split("+")[0].split(".")[:2] != minor:
        raise ImportError(
            f"trueshard load: this library was compiled for torch {compiled}, but the process runs torch {running}; rebuild "
            f"trueshard against that torch (pip install --force-reinstall --no-deps .), or install torch {'.'.join(minor)}"
        )
