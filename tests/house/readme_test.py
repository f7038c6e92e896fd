# SPDX-License-Identifier: BSD-3-Clause
"""The README's programs compile, link and run; the files that README and docs point to exist.

usage: readme_test.py links SOURCE_DIR
       readme_test.py programs SOURCE_DIR COMPILER FLAG...
A program is a ```cpp block that follows a line `<!-- complete program -->`; the other blocks are excerpts.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = re.compile(r"^<!-- complete program -->\n+```cpp\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# `tests/...` or `bench/...` in backticks: the file that stands behind a sentence or a number.
SOURCE = re.compile(r"`((?:tests|bench|docs|kernels|plugin|registration|torchscript_examples|cmake)/[\w./-]+)`")
# The commands a reader is told to type.
COMMAND = re.compile(r"^\s*(\./[\w.-]+(?:/[\w.-]+)*)", re.MULTILINE)


def pages(source):
    return [source / "README.md", source / "CONTRIBUTING.md", source / "CHANGELOG.md", *sorted((source / "docs").rglob("*.md"))]


def missing_files(source):
    """(page, what it points to) for everything that is not there."""
    missing, seen = [], 0
    for page in pages(source):
        text = page.read_text()
        targets = [page.parent / t for t in LINK.findall(text) if "://" not in t and not t.startswith("mailto:")]
        targets += [source / t for t in SOURCE.findall(text)]
        blocks = "".join(re.findall(r"^```(?:sh|bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        targets += [source / t for t in COMMAND.findall(blocks) if not t.startswith("./build")]
        seen += len(targets)
        missing += [(page.relative_to(source), t) for t in targets if not t.exists()]
    if seen < 20:
        sys.exit(f"FAILED: only {seen} references found; the patterns of this test no longer fit the pages")
    return missing


def run_programs(source, compiler, flags):
    programs = PROGRAM.findall((source / "README.md").read_text())
    if not programs:
        sys.exit("FAILED: README.md has no block marked <!-- complete program -->")
    with tempfile.TemporaryDirectory(prefix="trueshard_readme_") as folder:
        for number, text in enumerate(programs):
            file, program = Path(folder) / f"block{number}.cpp", Path(folder) / f"block{number}"
            file.write_text(text)
            for command in ([compiler, "-O0", str(file), "-o", str(program), *flags], [str(program)]):
                done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                                      env={**os.environ, "OMP_NUM_THREADS": "1"})
                if done.returncode != 0:
                    sys.exit(f"FAILED: program {number} of README.md: {' '.join(command)}\n{done.stdout}")


def main():
    mode, source = sys.argv[1], Path(sys.argv[2]).resolve()
    if mode == "links":
        missing = missing_files(source)
        if missing:
            sys.exit("\n".join(f"FAILED: {page} points to {target}, which does not exist" for page, target in missing))
    elif mode == "programs":
        run_programs(source, sys.argv[3], sys.argv[4:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
