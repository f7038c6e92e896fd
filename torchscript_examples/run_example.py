# SPDX-License-Identifier: BSD-3-Clause
"""Runs an example on several ranks and compares what rank 0 prints with a file.

usage: run_example.py --program PROGRAM --ranks N --expected FILE [ARGUMENT ...]      ARGUMENT: for the program
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

DEADLINE = 300  # seconds; a hang is a failure


def start(command, ranks, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    return [subprocess.Popen(command, cwd=folder, env=dict(base, RANK=str(rank)), text=True,
                             stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=None)
            for rank in range(ranks)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True, type=Path)
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--expected", required=True, type=Path)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = start([options.program.resolve(), *options.arguments], options.ranks, folder)
        try:
            printed = processes[0].communicate(timeout=DEADLINE)[0]
            codes = [process.wait(timeout=DEADLINE) for process in processes]
        finally:
            for process in processes:
                process.kill()
    print(printed, end="")
    if any(codes):
        sys.exit(f"FAILED: exit codes {codes}")
    if printed != options.expected.read_text():
        sys.exit(f"FAILED: expected\n{options.expected.read_text()}")


if __name__ == "__main__":
    main()
