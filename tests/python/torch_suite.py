# SPDX-License-Identifier: BSD-3-Clause
"""Runs PyTorch's own torch/testing/_internal/distributed/distributed_test.py on this backend.

    python tests/python/torch_suite.py --world 3                 every test; but the known exceptions; status 0 if all pass
    python tests/python/torch_suite.py --world 3 --fast          the tests that a change of the backend can break, in a minute
    python tests/python/torch_suite.py --world 3 --only NAME     the tests whose name contains NAME
    python tests/python/torch_suite.py --world 3 --backend gloo  the measure: what passes there must pass here

Each rank runs one test after the other in one process (the suite itself starts new processes for every test, which takes an
hour); after a failure the processes are started anew. The suite enables many tests for Gloo only, by name: it is imported as if
it ran on Gloo, and then told this backend's name. Needs the package `expecttest`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from datetime import timedelta

from torch_suite_exceptions import EXCEPTIONS, FAST, NEEDS_GPU

HANG_S = 120


class Name(str):
    """A backend's name that the suite's `if BACKEND == "gloo"` takes for Gloo's."""

    def __eq__(self, other):
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def fresh_seeds():
    """What a new process starts with: the suite relies on all ranks drawing the same numbers."""
    import random

    import torch

    torch.manual_seed(67280421310721)
    random.seed(0)


def load(backend, world):
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    import trueshard  # noqa: F401
    from torch.testing._internal.distributed import distributed_test as suite

    suite.BACKEND = Name(backend)

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    names = sorted(name for name in dir(Tests) if name.startswith("test_"))
    original = suite.Barrier.sync.__func__
    suite.Barrier.sync = classmethod(lambda cls, wait_for=None, timeout=60: original(cls, wait_for, timeout))
    return suite, Tests, names


def run_one(suite, tests, name, arguments, folder):
    import torch.distributed as dist

    os.environ["TEMP_DIR"] = folder
    for part in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    suite.Barrier.barrier_id = 0
    test = tests(name)
    test.rank, test.file_name = arguments.rank, os.path.join(folder, "store")
    fresh_seeds()
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, 60)
    try:
        dist.init_process_group(
            arguments.backend, init_method=f"file://{test.file_name}", world_size=arguments.world, rank=arguments.rank,
            timeout=timedelta(seconds=seconds),
        )
        test._barrier()
        getattr(test, name)()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as reason:
        status = f"skip {reason}"
    except SystemExit as exit_:
        known = [skip.message for skip in suite.TEST_SKIPS.values() if skip.exit_code == exit_.code]
        status = f"skip {known[0]}" if known else f"fail exit status {exit_.code}"
    except BaseException as error:
        import traceback

        traceback.print_exc()
        status = "fail " + f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    else:
        return "pass"
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def run_rank(arguments):
    import torch

    torch.set_num_threads(1)
    suite, tests, names = load(arguments.backend, arguments.world)
    with open(arguments.list) as file:
        names = file.read().split()
    for name in names:
        folder = os.path.join(arguments.folder, name)
        os.makedirs(folder, exist_ok=True)
        status = run_one(suite, tests, name, arguments, folder)
        with open(os.path.join(folder, f"new.{arguments.rank}"), "w") as file:
            file.write(status)
        os.rename(os.path.join(folder, f"new.{arguments.rank}"), os.path.join(folder, f"verdict.{arguments.rank}"))
        paths = [os.path.join(folder, f"verdict.{r}") for r in range(arguments.world)]
        while not all(os.path.exists(path) for path in paths):  # the parent ends a rank that waits for a dead one
            time.sleep(0.01)
        if any(open(path).read().startswith("fail") for path in paths):
            os._exit(3)
    os._exit(0)


def verdict_of(folder, world):
    """pass, skip ..., fail ...; None where the test did not end."""
    texts = []
    for r in range(world):
        path = os.path.join(folder, f"verdict.{r}")
        if not os.path.exists(path):
            return None
        texts.append(open(path).read())
    failed = [t for t in texts if t.startswith("fail")]
    if failed:
        return failed[0]
    return "pass" if "pass" in texts else texts[0]


def run_group(arguments, names, folder):
    """Runs tests until one fails or hangs; gives the verdicts so far."""
    listing = os.path.join(folder, "list")
    with open(listing, "w") as file:
        file.write("\n".join(names))
    log = open(os.path.join(folder, "log"), "a")
    common = [sys.executable, "-W", "ignore", __file__, "--world", str(arguments.world), "--backend", arguments.backend]
    common += ["--list", listing, "--folder", folder]
    ranks = [subprocess.Popen([*common, "--rank", str(r)], stdout=log, stderr=log) for r in range(arguments.world)]
    verdicts, last = {}, time.monotonic()
    while True:
        name = names[len(verdicts)]
        verdict = verdict_of(os.path.join(folder, name), arguments.world)
        if verdict is None and (all(r.poll() is not None for r in ranks) or time.monotonic() - last > HANG_S):
            verdict = "fail the processes ended" if all(r.poll() is not None for r in ranks) else f"fail no end in {HANG_S} s"
        if verdict is None:
            time.sleep(0.02)
            continue
        verdicts[name], last = verdict, time.monotonic()
        report(name, verdict)
        if verdict.startswith("fail") or len(verdicts) == len(names):
            break
    for rank in ranks:
        try:
            rank.wait(5 if len(verdicts) == len(names) else 1)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
    return verdicts


def report(name, verdict):
    if not verdict.startswith("skip"):
        print(f"{name}: {verdict}", flush=True)


def exception_of(name):
    return next((reason for beginning, reason in EXCEPTIONS.items() if name.startswith(beginning)), None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--backend", default="trueshard")
    parser.add_argument("--only")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--list")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments)
    try:
        import expecttest  # noqa: F401
    except ImportError:
        print("SKIP: PyTorch's suite needs the package expecttest")
        return
    names = load(arguments.backend, arguments.world)[2]
    names = [name for name in names if not any(word in name for word in NEEDS_GPU)]
    known = [name for name in names if exception_of(name) and not arguments.only]
    names = [name for name in names if name not in known]
    if arguments.fast:
        names = [name for name in names if name.startswith(FAST)]
    if arguments.only:
        names = [name for name in names if arguments.only in name]
    verdicts = {}
    start = time.monotonic()
    while len(verdicts) < len(names):
        with tempfile.TemporaryDirectory() as folder:
            verdicts.update(run_group(arguments, names[len(verdicts) :], folder))
            if list(verdicts.values())[-1].startswith("fail"):
                print(open(os.path.join(folder, "log")).read()[-6000:], flush=True)
    counts = Counter(v.split()[0] for v in verdicts.values())
    failed = [name for name, verdict in verdicts.items() if verdict.startswith("fail")]
    print("\n".join(f"FAILED {name}: {verdicts[name]}" for name in failed))
    print(f"world {arguments.world}, {arguments.backend}: {counts['pass']} passed, {len(failed)} failed, {counts['skip']} skipped by the "
          f"suite, {len(known)} known exceptions not run, in {time.monotonic() - start:.0f} s")
    sys.exit(1 if failed or counts["pass"] == 0 else 0)


if __name__ == "__main__":
    main()
