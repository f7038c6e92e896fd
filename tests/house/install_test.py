# SPDX-License-Identifier: BSD-3-Clause
"""Installs the built library to a fresh prefix and uses it as a stranger would: from a project outside the source tree.

usage: install_test.py --build BUILD_DIR --source SOURCE_DIR --cxx COMPILER
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*command, expect_failure=False):
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([str(c) for c in command], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if (done.returncode != 0) != expect_failure:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def check(condition, text):
    if not condition:
        sys.exit(f"FAILED: {text}")


def squeeze(text):
    """CMake wraps its messages."""
    return re.sub(r"\s+", " ", text)


def dynamic_section(library):
    """The DT_NEEDED names and the run path of a shared library."""
    text = run("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    path = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
    return needed, (path[0].split(":") if path else [])


def check_installed_files(prefix, source, build):
    public = {p.name for p in (source / "plugin/include/trueshard").glob("*.h")}
    installed = {p.name for p in (prefix / "include/trueshard").glob("*")}
    check(public and installed == public, f"installed headers {installed}, public headers {public}")
    archives = [p for p in prefix.rglob("*") if p.suffix in (".a", ".o")]
    check(not archives, f"internal archives were installed: {archives}")
    cache = (build / "CMakeCache.txt").read_text()
    torch = re.search(r"^TRUESHARD_TORCH_DIR:PATH=(.*)$", cache, re.MULTILINE).group(1)
    for file in list(prefix.rglob("*.cmake")) + list(prefix.rglob("*.h")):
        # The torch it was built against may lie below the source tree (build/venv), and is the one thing to refer to.
        text = file.read_text().replace(torch, "<torch>")
        for folder in (source, build):
            check(f"{folder}/" not in text, f"{file} refers to {folder}")
    targets = next(prefix.rglob("trueshardTargets.cmake")).read_text()
    for internal in ("kernels", "plan", "objects", "compile_rules"):
        check(f"trueshard_{internal}" not in targets, f"trueshardTargets.cmake refers to trueshard_{internal}")
    library = next(prefix.rglob("libtrueshard.so"))
    needed, run_path = dynamic_section(library)
    check(any(n.startswith("libtorch_cpu") for n in needed), f"{library} needs {needed}, expected libtorch_cpu")
    check(run_path[:1] == ["$ORIGIN"], f"{library} has run path {run_path}, expected $ORIGIN first")
    check(not any(str(build) in p for p in run_path), f"{library} has run path {run_path} into the build tree")


def check_torch_mismatch(project, prefix, work):
    """A torch of another minor version, and none at all, are refused with both versions and the way out."""
    other = work / "other_torch"
    (other / "lib").mkdir(parents=True)
    (other / "lib" / "libtorch_cpu.so").touch()
    (other / "version.py").write_text("__version__ = '2.1.2+cpu'\n")
    arguments = ["-S", project, f"-DCMAKE_PREFIX_PATH={prefix}"]
    text = squeeze(run("cmake", *arguments, "-B", work / "b1", f"-DTRUESHARD_TORCH_DIR={other}", expect_failure=True))
    check(re.search(r"built for torch 2\.\d+\.\d+\S*, but '\S+' holds torch 2\.1\.2\+cpu; pass -DTRUESHARD_TORCH_DIR", text), text)
    missing = work / "no_torch"
    text = squeeze(run("cmake", *arguments, "-B", work / "b2", f"-DTRUESHARD_TORCH_DIR={missing}", expect_failure=True))
    check(f"no torch package in '{missing}'" in text, text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--cxx", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trueshard_install_") as folder:
        work = Path(folder)
        prefix, project, build = work / "prefix", work / "project", work / "project_build"
        run("cmake", "--install", options.build, "--prefix", prefix)
        check_installed_files(prefix, options.source.resolve(), options.build.resolve())
        shutil.copytree(options.source / "tests/house/consumer", project)
        check_torch_mismatch(project, prefix, work)

        run("cmake", "-S", project, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={options.cxx}")
        run("cmake", "--build", build)
        text = run(build / "loads/loads")
        check(text.startswith("trueshard ") and "running torch" in text, text)
        needed, _ = dynamic_section(build / "loads/loads")
        check(any(n.startswith("libtrueshard") for n in needed), f"the program needs {needed}, libtrueshard was dropped")
        check(run(build / "trains/trains") == "trained 2 steps\n", "the training program's output")


if __name__ == "__main__":
    main()
