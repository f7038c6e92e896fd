# SPDX-License-Identifier: BSD-3-Clause
"""Distributed training whose reductions are exact to the bit.

    import torch.distributed as dist, trueshard
    dist.init_process_group("trueshard")

Importing it registers the torch.distributed backend "trueshard", the operators `torch.ops.trueshard.*` and the class
`torch.classes.trueshard.ShardedGradScaler`.
"""

import atexit as _atexit
import os as _os

import torch as _torch

from trueshard import _build
from trueshard._version_check import require_torch as _require_torch

_require_torch(_build.TORCH_VERSION, _torch.__version__)

import trueshard_autoload as _trueshard_autoload  # noqa: E402

from trueshard import _C  # noqa: E402
from trueshard._groups import create_backend, monitored_barrier  # noqa: E402
from trueshard import sharding as _sharding  # noqa: E402
from trueshard.sharding import *  # noqa: E402,F403

__version__ = _build.VERSION
__all__ = ["build_info", "cmake_prefix_path", "create_backend", "library_path", "monitored_barrier", *_sharding.__all__]

# The shared library: what a C++ program, torch.jit or torch.ops.load_library() loads to have the operators and classes.
library_path = _C.library_path()
# For find_package(trueshard CONFIG) of a C++ project; None in a build tree.
cmake_prefix_path = _os.path.dirname(__file__)
if not _os.path.isdir(_os.path.join(cmake_prefix_path, "lib", "cmake")):
    cmake_prefix_path = None

_trueshard_autoload.register()
_atexit.register(_C.close_backends)


def build_info():
    """Version of the library, and of the torch it was compiled for and runs on."""
    return _torch.ops.trueshard.build_info()
