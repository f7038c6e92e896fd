# SPDX-License-Identifier: BSD-3-Clause
"""Every text in the tables of docs/errors.md is a text of the sources.

usage: errors_page_test.py SOURCE_DIR
"""

import re
import sys
from pathlib import Path

ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
# Adjacent string literals are one text; values in between end it.
SEAM = re.compile(r'"\s*\n\s*"')


def main():
    source = Path(sys.argv[1])
    texts = ROW.findall((source / "docs/errors.md").read_text())
    if len(texts) < 20:
        sys.exit(f"FAILED: only {len(texts)} texts found in docs/errors.md")
    files = [p for room in ("plugin", "registration") for kind in ("*.cpp", "*.h") for p in (source / room).rglob(kind)]
    code = "\n".join(SEAM.sub("", p.read_text()) for p in files)
    unknown = [text for text in texts if text not in code]
    if unknown:
        sys.exit("\n".join(f"FAILED: docs/errors.md has `{text}`, which no source file says" for text in unknown))


if __name__ == "__main__":
    main()
