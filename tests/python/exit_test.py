# SPDX-License-Identifier: BSD-3-Clause
"""Ends of processes (field cases 30 and 32): every clean end gives status 0, and a rank that dies or stalls is an error on the
others within the timeout, never a hang.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

from ranks import Processes, expect_error

ENDS, FAULTS = {}, {}


def end(function):
    ENDS[function.__name__] = function


def fault(function):
    FAULTS[function.__name__] = function


def start(arguments, timeout_s=60):
    import torch.distributed as dist

    import trueshard  # noqa: F401

    store = dist.FileStore(arguments["store"], arguments["world"])
    dist.init_process_group(
        "trueshard", store=store, rank=arguments["rank"], world_size=arguments["world"], timeout=timedelta(seconds=timeout_s)
    )
    return dist


def ones(n=4):
    import torch

    return torch.ones(n)


@end
def without_teardown(arguments):
    start(arguments).all_reduce(ones())


@end
def teardown_twice(arguments):
    dist = start(arguments)
    dist.all_reduce(ones())
    backend = dist.group.WORLD._get_backend(ones().device)
    backend._shutdown() if hasattr(backend, "_shutdown") else backend.shutdown()
    backend._shutdown() if hasattr(backend, "_shutdown") else backend.shutdown()
    dist.destroy_process_group()


@end
def store_gone_first(arguments):
    dist = start(arguments)
    dist.all_reduce(ones())
    dist.barrier()
    if os.path.exists(arguments["store"]):
        try:
            os.unlink(arguments["store"])
        except FileNotFoundError:
            pass
    dist.all_reduce(ones())
    dist.destroy_process_group()


def wait_until_all_have_posted(dist, arguments):
    """A rank that ended before another has posted would be missed there, and rightly so."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"posted/{arguments['rank']}", "")
    store.wait([f"posted/{rank}" for rank in range(arguments["world"])])


@end
def work_not_waited_for(arguments):
    dist = start(arguments)
    for _ in range(10):
        dist.all_reduce(ones(1_000_000), async_op=True)
    dist.irecv(ones(), 1 - arguments["rank"])  # nobody sends
    wait_until_all_have_posted(dist, arguments)


@end
def an_exception_that_the_program_handles(arguments):
    dist = start(arguments)
    expect_error("elements is", lambda: dist.all_reduce(ones(3 + arguments["rank"])))
    dist.all_reduce(ones())


@end
def a_group_held_by_a_global(arguments):
    global held
    dist = start(arguments)
    held = (dist.group.WORLD, dist.new_group(), dist.all_reduce(ones(), async_op=True))
    wait_until_all_have_posted(dist, arguments)


@end
def a_forked_child_that_ends_like_any_program(arguments):
    dist = start(arguments)
    dist.all_reduce(ones(), async_op=True).wait()
    child = os.fork()
    if child == 0:
        sys.exit(0)  # through Python's own teardown, with the group inherited
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(ones())
    dist.destroy_process_group()


@end
def two_groups_torn_down_in_opposite_order(arguments):
    dist = start(arguments)
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.all_reduce(ones(), group=group)
    for group in groups if arguments["rank"] == 0 else reversed(groups):
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def survivors_throw(dist, arguments, call, pattern):
    """What a survivor must see: the error, at once again at the next call, and little CPU time meanwhile."""
    cpu, wall = time.process_time(), time.monotonic()
    expect_error(pattern, call)
    used, passed = time.process_time() - cpu, time.monotonic() - wall
    assert passed < 30, f"the error came after {passed} s"
    assert used < 0.5 * passed + 0.5, f"{used} s of CPU time in a wait of {passed} s"
    start_again = time.monotonic()
    expect_error("the group has failed", lambda: dist.all_reduce(ones()))
    assert time.monotonic() - start_again < 5


@fault
def killed_before_the_first_call_of_a_subgroup(arguments):
    dist = start(arguments, 20)
    group = dist.new_group()
    dist.barrier()
    if arguments["rank"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error("rank 1|ranks", lambda: dist.all_reduce(ones(), group=group))
    survivors_throw(dist, arguments, lambda: dist.all_reduce(ones()), "rank 1|ranks|the group has failed")


@fault
def killed_in_the_middle_of_a_large_all_reduce(arguments):
    dist = start(arguments, 20)
    dist.barrier()
    if arguments["rank"] == 1:
        dist.all_reduce(ones(30_000_000), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    x = ones(30_000_000)
    survivors_throw(dist, arguments, lambda: [dist.all_reduce(x) for _ in range(5)], "gone|the group has failed")


@fault
def stopped_instead(arguments):
    dist = start(arguments, 2)
    dist.barrier()
    if arguments["rank"] == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    survivors_throw(dist, arguments, lambda: dist.all_reduce(ones()), "rank 1 has not posted|the group has failed")


@fault
def killed_before_it_sends(arguments):
    dist = start(arguments, 20)
    dist.barrier()
    if arguments["rank"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    survivors_throw(dist, arguments, lambda: dist.recv(ones(), 1), "rank 1 is gone|the group has failed")


@fault
def late_with_what_it_should_send(arguments):
    dist = start(arguments, 2)
    if arguments["rank"] == 1:
        time.sleep(5)
        os._exit(9)
    survivors_throw(dist, arguments, lambda: dist.recv(ones(), 1), "rank 1 has not sent|the group has failed")


def run_all(kind):
    cases, world = (ENDS, 2) if kind == "ends" else (FAULTS, 3)
    failed = []
    for name in cases:
        with tempfile.TemporaryDirectory() as folder:
            common = [sys.executable, __file__, kind, name, os.path.join(folder, "store"), str(world)]
            processes = Processes([[*common, str(r)] for r in range(world)])
            if kind == "faults":  # the stopped rank is ended when the others are done
                for r in (0, 2):
                    try:
                        processes.children[r].wait(120)
                    except subprocess.TimeoutExpired:
                        pass
                processes.children[1].kill()
            statuses = processes.wait(120, stop_at_failure=False)
        expected = all(s == 0 for s in statuses) if kind == "ends" else statuses[0] == statuses[2] == 0
        print(f"{'passed' if expected else 'FAILED'} {name} {statuses}", flush=True)
        if not expected:
            failed.append(name)
    sys.exit(1 if failed or not cases else 0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_all(sys.argv[1])
    _, kind, name, store, world, rank = sys.argv
    (ENDS if kind == "ends" else FAULTS)[name]({"store": store, "world": int(world), "rank": int(rank)})
