# SPDX-License-Identifier: BSD-3-Clause
"""Runs the main job of the example, then the proof: many ways to shard one training run, the same bits.

Needs the program gpt_train, and a Python that has torch for the rows of the TorchScript model (script.py). Exits 0 when every run ended with the same bits.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass

from picture import loss_picture

KIB = 1 << 10
MIB = 1 << 20
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK",
                    "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
MODEL = {"width": 160, "heads": 5, "layers": 4, "context": 128, "batch": 4, "lr": 1e-3}
TINY = {"width": 32, "heads": 2, "layers": 2, "context": 32, "batch": 4, "lr": 4e-3, "corpus-bytes": MIB}
BUCKETS = (MIB, 128 * KIB)
TINY_BUCKETS = (32 * KIB, 4 * KIB)
DEADLINE = 1800  # seconds for one run; a run that hangs is a failure, not a wait


@dataclass(frozen=True)
class Row:
    """One way to run the proof's training: always four leaves a step, the same ones in the same order."""
    stage: str
    ranks: int = 4
    passes: int = 1
    bucket: int = 1 << 20
    overlap: str = "on"
    script: bool = False  # the TorchScript model in place of the torch::nn one

    def name(self):
        return f"{'script-' if self.script else ''}{self.stage}-{self.ranks}x{self.passes}-{self.bucket}-{self.overlap}"


def rows(buckets):
    """`buckets`: a larger and a smaller bucket size; both cut the model into several buckets."""
    stages = ("replicated", "zero1", "zero2", "zero3")
    table = [Row(stage, bucket=bucket, overlap=overlap)
             for stage in stages for bucket in buckets for overlap in ("on", "off")]
    return table + [Row("zero2", ranks=2, passes=2, bucket=buckets[0]), Row("zero3", ranks=1, passes=4, bucket=buckets[0]),
                    Row("replicated", bucket=buckets[0], script=True), Row("zero3", bucket=buckets[0], script=True)]


class Failure(Exception):
    pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launcher:
    def __init__(self, program, corpus, out):
        self.program, self.corpus, self.out, self.made = program, corpus, out, set()

    def script(self, model):
        """The TorchScript file of the model, made when it is first asked for."""
        file = self.out / "gpt.pt"
        if file not in self.made:
            command = [sys.executable, pathlib.Path(__file__).parent / "script.py", file]
            subprocess.run(command + [str(model[key]) for key in ("width", "heads", "layers", "context")], check=True)
            self.made.add(file)
        return file

    def run(self, name, ranks, options, live=False):
        """Starts the ranks, waits for all of them and returns their journals. `live`: rank 0 writes to our output."""
        base = {key: value for key, value in os.environ.items() if key not in LAUNCH_VARIABLES}
        base.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")
        log = self.out / name
        command = [self.program, "--corpus", self.corpus, "--log", str(log) + ".json"]
        for key, value in options.items():
            command += ["--" + key, str(value)]
        sys.stdout.flush()
        processes, texts = [], []
        for rank in range(ranks):
            texts.append(pathlib.Path(f"{log}.rank{rank}.txt"))
            with open(texts[-1], "wb") as text:
                seen = None if live and rank == 0 else text
                processes.append(subprocess.Popen(command, stdout=seen, stderr=text, env={**base, "RANK": str(rank)}))
        codes = wait_for_all(processes)
        if any(codes):
            said = "\n".join(f"--- rank {rank}, exit code {code}\n" + text.read_text(errors="replace")[-2000:]
                             for rank, (code, text) in enumerate(zip(codes, texts)) if code)
            raise Failure(f"run {name} failed:\n{said}")
        return [json.loads(pathlib.Path(f"{log}.json.{rank}").read_text()) for rank in range(ranks)]


def wait_for_all(processes):
    """Exit codes. Once one has failed the others get a little time to say what they saw, then they are ended."""
    end = time.monotonic() + DEADLINE
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + 15)
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in processes]


def main_job(launcher, model, arguments):
    options = {**model, "stage": "zero2", "passes": 2, "bucket-bytes": MIB, "overlap": "on", "dtype": "bf16"}
    steps = arguments.steps
    if steps is None:
        trial = launcher.run("trial", 4, {**options, "steps": 6})[0]
        seconds = sorted(step["seconds"] for step in trial["steps"][2:])[1]
        steps = min(400, max(120, round(arguments.seconds / seconds, -1)))
        print(f"a step takes {seconds:.2f} s here: {steps:.0f} steps for about {arguments.seconds} s")
    steps = int(steps)
    options.update({"steps": steps, "warmup": steps // 10, "report-every": max(1, steps // 25),
                    "validate-every": max(1, steps // 8), "growth-interval": 50, "sample": arguments.sample})
    journals = launcher.run("main", 4, options, live=True)
    journal = journals[0]
    if len({of_rank["digest"] for of_rank in journals}) != 1:
        raise Failure("the ranks of the main job ended with different weights")
    first, last = journal["validation"][0]["loss"], journal["validation"][-1]["loss"]
    if not last < (0.6 if arguments.steps is None else 0.99) * first:
        raise Failure(f"the main job did not learn: validation loss {first} at the start, {last} at the end")
    print(f"loss on held-out files: {first:.4f} -> {last:.4f} nats per byte; {journal['skipped']} skipped steps")
    return journal


def speed(journal):
    steps = journal["steps"][2:] or journal["steps"]
    return journal["tokens_per_step"] * len(steps) / sum(step["seconds"] for step in steps)


def bits(journals):
    """What must be the same in every row: all ranks' weights; loss, norm and scale of every step."""
    story = [(step["loss"], step["norm"], step["scale"]) for step in journals[0]["steps"]]
    return sorted({journal["digest"] for journal in journals}), story


def check_memory(row, journals):
    total = {key: sum(journal["memory"][key] for journal in journals) for key in ("ledger", "formula", "formula_padded")}
    if not total["formula"] <= total["ledger"] <= total["formula_padded"]:
        raise Failure(f"run {row.name()}: {total['ledger']} bytes in all ranks between steps; by formula "
                      f"{total['formula']}, with padding at most {total['formula_padded']}")


HEADINGS = ("stage", "ranks x passes", "bucket", "overlap", "last loss", "weights", "MB/rank", "formula", "process", "tokens/s")


def cells(row, journals):
    mean = {key: sum(journal["memory"][key] for journal in journals) / len(journals) / 1e6 for key in journals[0]["memory"]}
    return (f"script {row.stage}" if row.script else row.stage, f"{row.ranks} x {row.passes}", f"{row.bucket // KIB} KiB", row.overlap,
            f"{journals[0]['steps'][-1]['loss']:.9f}", journals[0]["digest"], f"{mean['ledger']:.2f}",
            f"{mean['formula']:.2f}", f"{mean['process']:.0f}", f"{speed(journals[0]):.0f}")


def proof(launcher, model, steps, ways):
    options = {**model, "dtype": "bf16", "steps": steps, "warmup": 4, "growth-interval": 5}
    results, lines = [], []
    widths = [max(len(heading), width) for heading, width in zip(HEADINGS, (17, 0, 8, 0, 11, 16, 0, 0, 0, 0))]
    for row in [None] + ways:
        if row is None:
            texts = HEADINGS
        else:
            script = {"script": launcher.script(model)} if row.script else {}
            journals = launcher.run("proof-" + row.name(), row.ranks, {
                **options, "stage": row.stage, "passes": row.passes, "bucket-bytes": row.bucket, "overlap": row.overlap, **script})
            results.append((row, journals))
            texts = cells(row, journals)
        lines.append("  ".join(text.rjust(width) for text, width in zip(texts, widths)))
        print(lines[-1], flush=True)
    print("MB/rank: held between steps, as metrics() counts it; formula: 2 + 16 bytes an element, in ZeRO-1 and 2 18 / ranks (one 16-bit copy for\n"
          "all ranks), in ZeRO-3 16 / ranks;\n"
          "process: growth of the rank's own and shared memory since before the model was made, torch's caches included.")
    return results, lines


def verdict(results):
    """Raises Failure for the first row that differs from the first one of the same model. Returns the digests."""
    found = {}
    for row, journals in results:
        first_row, first = found.setdefault(row.script, (row, bits(journals)))
        digests, story = bits(journals)
        if len(digests) != 1:
            raise Failure(f"run {row.name()}: its ranks ended with different weights: {', '.join(digests)}")
        if digests != first[0]:
            raise Failure(f"run {row.name()} ended with weights {digests[0]}, {first_row.name()} with {first[0][0]}")
        for step, (mine, expected) in enumerate(zip(story, first[1]), start=1):
            if mine != expected:
                raise Failure(f"run {row.name()}, step {step}: loss, norm, scale {mine}; {first_row.name()} has {expected}")
        check_memory(row, journals)
    return [first[0][0] for _, first in found.values()]


def draw(main, results, out):
    def curve(journal, what):
        return [(point["step"], point["loss"]) for point in journal[what]]

    drawing = loss_picture((curve(main, "steps"), curve(main, "validation")),
                           [curve(journals[0], "steps") for row, journals in results if not row.script])
    (out / "loss.svg").write_text(drawing.svg())
    (out / "loss.png").write_bytes(drawing.png())


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True, help="the built gpt_train")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for logs, table and picture")
    parser.add_argument("--corpus", default=sysconfig.get_paths()["stdlib"], help="default: this Python's standard library")
    parser.add_argument("--seconds", type=int, default=140, help="about how long the main job takes (default 140)")
    parser.add_argument("--steps", type=int, help="steps of the main job, in place of --seconds")
    parser.add_argument("--proof-steps", type=int, default=12, help="steps of each run of the proof (default 12)")
    parser.add_argument("--sample", type=int, default=240, help="bytes that the trained model writes (default 240)")
    parser.add_argument("--tiny", action="store_true", help="a small model for a few steps: seconds, for automatic tests")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps, arguments.proof_steps, arguments.sample = arguments.steps or 8, 4, 16
    return arguments


def main():
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(arguments.program, arguments.corpus, arguments.out)
    model = TINY if arguments.tiny else MODEL
    ways = rows(TINY_BUCKETS if arguments.tiny else BUCKETS)
    try:
        print("== main job: 4 ranks x 2 passes, ZeRO-2, bf16 compute, fp32 masters", flush=True)
        journal = main_job(launcher, model, arguments)
        print(f"== proof: {len(ways)} ways to run the same {arguments.proof_steps} steps", flush=True)
        results, lines = proof(launcher, model, arguments.proof_steps, ways)
        draw(journal, results, arguments.out)
        (arguments.out / "table.txt").write_text("\n".join(lines) + "\n")
        digests = verdict(results)
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"table and loss curve: {arguments.out}/table.txt, loss.svg, loss.png")
    print(f"The bits are identical: all {len(results)} runs have the same losses, norms and scales in every step and end with "
          f"the same weights: {digests[0]}, and the TorchScript model {digests[1]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
