# SPDX-License-Identifier: BSD-3-Clause
"""Counts ctest's results and writes every skipped test with its reason.

usage: count_tests.py CTEST_OUTPUT LastTest.log SKIPS.txt     prints: PASSED FAILED SKIPPED
A reason is what stands after GoogleTest's `file:line: Skipped`, or after `SKIP:` in a script's output.
"""

import re
import sys
from pathlib import Path

# "12/40 Test #7: Name ......***Skipped 0.1 sec"; names may hold blanks, three dots end them.
RESULT = re.compile(r"^ *\d+/\d+ Test +#\d+: (.*?) \.\.\.*[ .]*(\*\*\*\w[\w ]*|Passed)", re.MULTILINE)
SECTION = re.compile(r"^\d+/\d+ Testing: (.+)$", re.MULTILINE)
GTEST_REASON = re.compile(r"^\S+:\d+: Skipped\n(.*)$", re.MULTILINE)
SCRIPT_REASON = re.compile(r"^SKIP: *(.*)$", re.MULTILINE)


def outcome(word):
    return "passed" if word == "Passed" else "skipped" if word.startswith("***Skipped") else "failed"


def reasons(log):
    parts = SECTION.split(log)
    found = {}
    for name, text in zip(parts[1::2], parts[2::2]):
        match = GTEST_REASON.search(text) or SCRIPT_REASON.search(text)
        found[name] = match.group(1).strip() if match else ""
    return found


def main():
    results = [(name, outcome(word)) for name, word in RESULT.findall(Path(sys.argv[1]).read_text(errors="replace"))]
    if not results:
        sys.exit("no results in ctest's output")
    why = reasons(Path(sys.argv[2]).read_text(errors="replace"))
    skips = [f"   skipped: {name}: {why.get(name) or 'no reason given'}\n" for name, kind in results if kind == "skipped"]
    Path(sys.argv[3]).write_text("".join(skips))
    print(*(sum(kind == wanted for _, kind in results) for wanted in ("passed", "failed", "skipped")))


if __name__ == "__main__":
    main()
