# SPDX-License-Identifier: BSD-3-Clause
"""Reads the include lines of every source file and fails on an arrow that points up.

  layers_test.py ROOT           checks the tree under ROOT
  layers_test.py --self-check   plants one violation of each rule in a temporary tree and expects it to be found

Further rules: kernels/ and plugin/plan/ include no torch; public headers include public headers only (they are installed
alone); torch-version #ifs stand in plugin/comm/torch_compat.h only; every source file starts with the SPDX line.
"""
import os
import re
import sys
import tempfile

# Lowest first. A file may include files of its own layer and of lower ones.
LAYERS = [
    ["kernels"],
    ["plugin/plan"],
    # Public headers that hold values only, no declaration of anything implemented above: the rooms share their vocabulary.
    ["plugin/include/trueshard/export.h", "plugin/include/trueshard/metrics.h",
     "plugin/include/trueshard/shard_options.h"],
    ["plugin/observe"],
    ["plugin/comm"],
    ["plugin/engine"],
    # The class whose state and steps plugin/optim implements (its Session is a friend); the engine does not know it.
    ["plugin/optim", "plugin/include/trueshard/sharded_optimizer.h"],
    ["plugin/checkpoint"],
    ["plugin/api", "plugin/include"],
    ["registration"],
    ["torchscript_examples", "tests", "bench", "python"],
]
NO_TORCH = ("kernels", "plugin/plan")
TORCH = re.compile(r"(torch|ATen|c10|caffe2)(/|\.h$)")
COMPAT = "plugin/comm/torch_compat.h"
PUBLIC = "plugin/include"
CPP = (".h", ".hpp", ".cuh", ".cpp", ".cc", ".cu")
OTHER_SOURCES = (".py", ".cmake", ".sh", ".in", ".yml", ".yaml")
SPDX = "SPDX-License-Identifier: BSD-3-Clause"
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.M)
CONDITION = re.compile(r"^\s*#\s*(?:if|elif|ifdef|ifndef|elifdef|elifndef)\b[^\n]*TORCH_VERSION", re.M)


def inside(path, folder):
    return path == folder or path.startswith(folder + "/")


def layer(path):
    """The layer's number; the longest matching entry decides. None: the file belongs to no room."""
    best = None
    for number, entries in enumerate(LAYERS):
        for entry in entries:
            if inside(path, entry) and (best is None or len(entry) > len(best[1])):
                best = (number, entry)
    return None if best is None else best[0]


def source_files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f == ".ci" or not f.startswith((".", "build", "__pycache__")))
        for name in sorted(names):
            if name.endswith(CPP + OTHER_SOURCES) or name == "CMakeLists.txt":
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def code_of(text):
    """Without comments and with continued lines joined, so that only real directives match. Strings stay."""
    text = text.replace("\\\n", " ")
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    return re.sub(pattern, lambda m: m.group(0) if m.group(0)[0] == '"' else " ", text, flags=re.S)


def resolve(root, path, target):
    """The included file's path from the root, or None when it is not the project's."""
    nearby = os.path.normpath(os.path.join(os.path.dirname(path), target)).replace(os.sep, "/")
    for candidate in (nearby, target, PUBLIC + "/" + target):
        if os.path.isfile(os.path.join(root, candidate)):
            return os.path.normpath(candidate).replace(os.sep, "/")
    return target if layer(target) is not None else None  # named after a room: judged even where it does not exist


def check_spdx(path, text):
    lines = text.split("\n")
    first = lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]
    return [] if SPDX in first else [f"{path}:1: does not start with '{SPDX}'; put it into a comment on the first line"]


def check_includes(root, path, code):
    errors = []
    own = layer(path)
    for quote, target in INCLUDE.findall(code):
        if any(inside(path, room) for room in NO_TORCH) and TORCH.match(target):
            errors.append(f"{path}: includes torch ({target}); {' and '.join(NO_TORCH)} do without")
        found = resolve(root, path, target)
        if found is None or own is None:
            continue
        theirs = layer(found)
        if theirs is None:
            errors.append(f"{path}: includes {found}, which is in no layer; add its room to LAYERS")
        elif theirs > own:
            errors.append(f"{path}: includes {found}, an upward include ({LAYERS[own][0]} is below {LAYERS[theirs][0]}); "
                          "move what is needed down")
        elif inside(path, PUBLIC) and not inside(found, PUBLIC):
            errors.append(f"{path}: a public header includes {found}, which is not installed; declare it forward")
    return errors


def check(root):
    errors = []
    count = 0
    for path in source_files(root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        errors += check_spdx(path, text)
        if not path.endswith(CPP):
            continue
        count += 1
        if layer(path) is None:
            errors.append(f"{path}: is in no layer; add its room to LAYERS")
        code = code_of(text)
        errors += check_includes(root, path, code)
        if path != COMPAT and CONDITION.search(code):
            errors.append(f"{path}: a torch-version #if outside {COMPAT}; move it there")
    if count == 0:
        errors.append(f"{root}: no C++ file found; pass the root of the source tree")
    return errors


HEADER = f"// {SPDX}\n"
GOOD = {
    "kernels/kernels.h": HEADER + "#include <vector>\n",
    "plugin/plan/p.h": HEADER + '#include "kernels/kernels.h"\n// #include <torch/torch.h> costs seconds\n',
    "plugin/observe/trace.h": HEADER + '#include <trueshard/metrics.h>\n',
    "plugin/comm/torch_compat.h": HEADER + "#if TORCH_VERSION_MAJOR > 2\n#endif\n",
    "plugin/comm/c.cpp": HEADER + '#include "plugin/observe/trace.h"\n#include "torch_compat.h"\n#include "generated.h"\n',
    "plugin/engine/e.h": HEADER + '#include "../comm/torch_compat.h"\n/* #include "plugin/api/a.h" */\n',
    "plugin/optim/o.cpp": HEADER + '#include <trueshard/sharded_optimizer.h>\nconst char* text = "// no comment";\n',
    "plugin/include/trueshard/sharded_optimizer.h": HEADER + "#include <trueshard/metrics.h>\n",
    "plugin/include/trueshard/metrics.h": HEADER + "#include <string>\n",
    "plugin/include/trueshard/trueshard.h": HEADER + "#include <trueshard/metrics.h>\n",
    "plugin/api/a.cpp": HEADER + '#include "trueshard/trueshard.h"\n#include "plugin/engine/e.h"\n',
    "registration/r.cpp": HEADER + '#include "plugin/engine/e.h"\n',
    "tests/t_test.cpp": HEADER + '#include "plugin/engine/e.h"\n',
    "tests/run.sh": f"#!/bin/sh\n# {SPDX}\n",
    "CMakeLists.txt": f"# {SPDX}\n",
}
BAD = [  # (file, content, what the report must say)
    ("kernels/bad.cpp", HEADER + '#include "plugin/plan/p.h"\n', "upward include"),
    ("plugin/plan/bad.cpp", HEADER + '#include "plugin/observe/trace.h"\n', "upward include"),
    ("plugin/observe/bad.cpp", HEADER + '#include "plugin/comm/torch_compat.h"\n', "upward include"),
    ("plugin/comm/bad.cpp", HEADER + '#  include "../engine/e.h"\n', "upward include"),
    ("plugin/comm/bad2.cpp", HEADER + '#include <trueshard/trueshard.h>\n', "upward include"),
    ("plugin/engine/bad0.cpp", HEADER + "#include <trueshard/sharded_optimizer.h>\n", "upward include"),
    ("plugin/engine/bad.cpp", HEADER + '#include "plugin/optim/not_written_yet.h"\n', "upward include"),
    ("plugin/optim/bad.cpp", HEADER + 'const char* s = "/*";\n#include "plugin/api/a.h"\n', "upward include"),
    ("plugin/api/bad.cpp", HEADER + '#include "registration/r.h"\n', "upward include"),
    ("registration/bad.cpp", HEADER + '#include "tests/support.h"\n', "upward include"),
    ("plugin/include/trueshard/bad.h", HEADER + '#include "plugin/engine/e.h"\n', "not installed"),
    ("plugin/plan/bad2.cpp", HEADER + "#include <torch/torch.h>\n", "includes torch"),
    ("kernels/bad2.cpp", HEADER + '#include "ATen/core/Tensor.h"\n', "includes torch"),
    ("kernels/cpu/bad3.cpp", HEADER + "#include <c10/util/BFloat16.h>\n", "includes torch"),
    ("plugin/engine/bad2.cpp", HEADER + "#if defined(X) && \\\n  TORCH_VERSION_MINOR >= 13\n#endif\n", "torch-version #if"),
    ("plugin/comm/bad3.h", HEADER + "#ifdef TORCH_VERSION_MAJOR\n#endif\n", "torch-version #if"),
    ("plugin/unknown/bad.h", HEADER, "in no layer"),
    ("plugin/engine/bad3.cpp", "#include <vector>\n" + HEADER, "does not start with"),
    ("tests/bad.py", "import os\n", "does not start with"),
    ("bench/CMakeLists.txt", "", "does not start with"),
]


def write(root, files):
    for path, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
        with open(os.path.join(root, path), "w", encoding="utf-8") as file:
            file.write(text)


def self_check():
    errors = []
    with tempfile.TemporaryDirectory() as root:
        if not check(root):
            errors.append("self-check: an empty tree passes")
        write(root, GOOD)
        errors += ["self-check: a good tree is refused: " + error for error in check(root)]
        for path, text, expected in BAD:
            write(root, {path: text})
            found = check(root)
            if len(found) != 1 or path not in found[0] or expected not in found[0]:
                errors.append(f"self-check: '{expected}' planted in {path}, reported: {found}")
            os.remove(os.path.join(root, path))
    return errors


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: layers_test.py ROOT | --self-check")
    errors = self_check() if sys.argv[1] == "--self-check" else check(sys.argv[1])
    print("\n".join(errors) if errors else "ok")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
