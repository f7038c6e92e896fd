# SPDX-License-Identifier: BSD-3-Clause
"""Starts the ranks of a Python test and runs its cases on all of them, one after the other, on one process group.

A test file names its cases with @case and ends with `ranks.main(__file__)`:
    python some_test.py --world 3 [--only NAME]
Exit status 0 only if every case passed on every rank. Needs no pytest.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback

CASES = []
TIMEOUT_S = 300


class Skip(Exception):
    """Raised by a case, on all ranks alike, that cannot run here; the text is the reason."""


def case(function=None, *, worlds=None):
    def add(f):
        CASES.append((f, worlds))
        return f

    return add(function) if function is not None else add


def expect_error(pattern, function, kind=RuntimeError):
    """The text of the error that `function` must raise, matching the pattern."""
    try:
        function()
    except kind as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"expected an error like {pattern!r}, got: {error}") from error
        return str(error)
    raise AssertionError(f"expected an error like {pattern!r}, got none")


def run_rank(arguments):
    import torch
    import torch.distributed as dist

    import trueshard  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        "trueshard", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=arguments.world
    )
    for function, worlds in CASES:
        if (worlds and arguments.world not in worlds) or (arguments.only and arguments.only not in function.__name__):
            continue
        start = time.monotonic()
        try:
            function(arguments.rank, arguments.world)
            dist.barrier()
        except Skip as reason:
            print(f"SKIP: {function.__name__}: {reason}", flush=True)
        except BaseException:
            print(f"FAILED {function.__name__} on rank {arguments.rank}\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        else:
            if arguments.rank == 0:
                print(f"passed {function.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    dist.destroy_process_group()


class Processes:
    """The ranks as processes; their output comes out line by line, with the rank in front."""

    def __init__(self, commands, environment=None):
        self.outputs = ["" for _ in commands]
        self.children = [
            subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            for c in commands
        ]
        self.readers = [threading.Thread(target=self._read, args=(r,)) for r in range(len(commands))]
        for reader in self.readers:
            reader.start()

    def _read(self, rank):
        for line in self.children[rank].stdout:
            self.outputs[rank] += line
            print(line if line.startswith("SKIP:") else f"[{rank}] {line}", end="", flush=True)

    def wait(self, timeout_s=TIMEOUT_S, stop_at_failure=True):
        """Exit statuses. When a rank has failed the others get a moment to say why, too."""
        deadline = time.monotonic() + timeout_s
        while any(c.poll() is None for c in self.children) and time.monotonic() < deadline:
            if stop_at_failure and any(c.poll() not in (None, 0) for c in self.children):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.02)
        for child in self.children:
            if child.poll() is None:
                child.kill()
        for reader in self.readers:
            reader.join()
        return [child.wait() for child in self.children]


def main(file):
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments)
    with tempfile.TemporaryDirectory() as folder:
        common = ["--world", str(arguments.world), "--store", os.path.join(folder, "store")]
        if arguments.only:
            common += ["--only", arguments.only]
        commands = [[sys.executable, file, *common, "--rank", str(r)] for r in range(arguments.world)]
        processes = Processes(commands)
        statuses = processes.wait()
    count = processes.outputs[0].count("passed ")
    print(f"world {arguments.world}: {count} cases passed, exit statuses {statuses}")
    sys.exit(0 if count > 0 and not any(statuses) else 1)
