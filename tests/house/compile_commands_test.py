# SPDX-License-Identifier: BSD-3-Clause
"""Reads compile_commands.json and fails unless every file of the library is compiled for exact arithmetic.

  compile_commands_test.py ROOT BUILD/compile_commands.json   checks kernels/, plugin/ and registration/ under ROOT
  compile_commands_test.py --self-check                       plants bad commands in a temporary tree and expects them found

Why: GCC contracts a*b+c to fma unless told not to, and fast-math reorders sums; both change promised bits.
"""
import json
import os
import shlex
import sys
import tempfile

ROOMS = ("kernels", "plugin", "registration")
# Flags that let the compiler change results. (-fno-math-errno and -fno-trapping-math change none.)
FORBIDDEN = (
    "-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-freciprocal-math", "-ffinite-math-only",
    "-fno-signed-zeros", "-fsingle-precision-constant", "-fcx-limited-range", "-mrecip", "-mdaz-ftz", "-use_fast_math",
    "--use_fast_math",
)
FORBIDDEN_STARTS = ("-mrecip=", "-fp-model=fast", "-ffp-model=fast", "-ffp-model=aggressive", "-fexcess-precision=fast")


def arguments_of(entry):
    arguments = list(entry["arguments"]) if "arguments" in entry else shlex.split(entry["command"])
    flags = []
    for argument in arguments:  # nvcc hands on -Xcompiler=-a,-b
        flags += argument.split("=", 1)[1].split(",") if argument.startswith("-Xcompiler=") else [argument]
    return flags


def path_in(root, entry):
    path = os.path.realpath(os.path.join(entry.get("directory", ""), entry["file"]))
    return os.path.relpath(path, os.path.realpath(root)).replace(os.sep, "/")


def in_rooms(path):
    return path.split("/", 1)[0] in ROOMS


def files_of(entry):
    """The sources that a command compiles: those that a unity file includes, or the file itself."""
    name = entry["file"]
    if "/Unity/unity_" not in name:
        return [entry]
    with open(os.path.join(entry.get("directory", ""), name), encoding="utf-8") as file:
        included = [line.split('"')[1] for line in file if line.startswith("#include")]
    return [{**entry, "file": source} for source in included]


def errors_of(path, flags):
    errors = [f"{path}: compiled with {flag}; remove it, it changes promised bits"
              for flag in flags if flag in FORBIDDEN or flag.startswith(FORBIDDEN_STARTS)]
    contract = [flag for flag in flags if flag.startswith("-ffp-contract=")]
    if not contract or contract[-1] != "-ffp-contract=off":  # the last one counts
        errors.append(f"{path}: compiled with {contract[-1] if contract else 'no -ffp-contract at all'}, expected "
                      "-ffp-contract=off; link trueshard_compile_rules to its target")
    if path.endswith(".cu"):
        fmad = [flag for flag in flags if flag.lstrip("-").startswith("fmad=")]
        if not fmad or not fmad[-1].endswith("=false"):
            errors.append(f"{path}: compiled without --fmad=false; add it to its target")
    return errors


def expected_files(root):
    for room in ROOMS:
        for folder, folders, names in os.walk(os.path.join(root, room)):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".cpp"):
                    yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def check(root, commands):
    with open(commands, encoding="utf-8") as file:
        entries = json.load(file)
    errors, seen = [], set()
    for entry in (source for command in entries for source in files_of(command)):
        path = path_in(root, entry)
        if in_rooms(path):
            seen.add(path)
            errors += errors_of(path, arguments_of(entry))
    errors += [f"{path}: no command compiles it; add it to its room's CMakeLists.txt"
               for path in expected_files(root) if path not in seen]
    if not seen:
        errors.append(f"{commands}: holds no file of {', '.join(ROOMS)}; pass the build folder of this source tree")
    return errors


OFF = "-ffp-contract=off"
BAD = [  # (file, flags, what the report must say)
    ("kernels/a.cpp", [], "no -ffp-contract at all"),
    ("plugin/b.cpp", ["-ffp-contract=fast"], "compiled with -ffp-contract=fast"),
    ("registration/c.cpp", [OFF, "-ffp-contract=on"], "compiled with -ffp-contract=on"),
    ("kernels/a.cpp", [OFF, "-Ofast"], "compiled with -Ofast"),
    ("kernels/a.cpp", [OFF, "-ffast-math"], "compiled with -ffast-math"),
    ("plugin/b.cpp", [OFF, "-fassociative-math"], "compiled with -fassociative-math"),
    ("plugin/b.cpp", [OFF, "-mrecip=all"], "compiled with -mrecip=all"),
    ("kernels/k.cu", ["-Xcompiler=-fPIC," + OFF], "without --fmad=false"),
    ("kernels/k.cu", ["-Xcompiler=" + OFF, "--fmad=false", "--use_fast_math"], "compiled with --use_fast_math"),
]


def self_check():
    errors = []
    with tempfile.TemporaryDirectory() as root:
        commands = os.path.join(root, "compile_commands.json")
        good = {"kernels/a.cpp": [OFF, "-O3", "-fno-math-errno"], "plugin/b.cpp": ["-ffp-contract=on", OFF],
                "registration/c.cpp": [OFF], "tests/d.cpp": ["-ffast-math"], "kernels/k.cu": [OFF, "--fmad=false"]}

        def found(flags_of, as_command):
            entries = []
            for path, flags in flags_of.items():
                arguments = ["c++", *flags, "-c", path]
                form = {"command": shlex.join(arguments)} if as_command else {"arguments": arguments}
                entries.append({"directory": root, "file": path, **form})
            with open(commands, "w", encoding="utf-8") as file:
                json.dump(entries, file)
            return check(root, commands)

        for path in good:
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8"):
                pass
        for as_command in (True, False):
            errors += ["self-check: good commands are refused: " + error for error in found(good, as_command)]
            for path, flags, expected in BAD:
                report = found({**good, path: flags}, as_command)
                if len(report) != 1 or path not in report[0] or expected not in report[0]:
                    errors.append(f"self-check: {flags} planted for {path}, expected '{expected}', reported: {report}")
        report = found({path: flags for path, flags in good.items() if path != "plugin/b.cpp"}, True)
        if len(report) != 1 or "plugin/b.cpp: no command compiles it" not in report[0]:
            errors.append(f"self-check: a file that nothing compiles, reported: {report}")
        unity = os.path.join(root, "build", "Unity", "unity_0_cxx.cxx")
        os.makedirs(os.path.dirname(unity))
        with open(unity, "w", encoding="utf-8") as file:
            file.write(f'/* generated */\n#include "{root}/plugin/b.cpp"\n#include "{root}/registration/c.cpp"\n')
        alone = {"kernels/a.cpp": [OFF], "kernels/k.cu": [OFF, "--fmad=false"]}
        errors += ["self-check: good unity files are refused: " + error for error in found({**alone, unity: [OFF]}, True)]
        if len(found({**alone, unity: []}, True)) != 2:
            errors.append("self-check: a unity file of two sources without -ffp-contract=off is not reported for both")
        if not found({}, True):
            errors.append("self-check: no commands at all pass")
    return errors


def main():
    if sys.argv[1:] == ["--self-check"]:
        errors = self_check()
    elif len(sys.argv) == 3:
        errors = check(sys.argv[1], sys.argv[2])
    else:
        sys.exit("usage: compile_commands_test.py ROOT COMPILE_COMMANDS_JSON | --self-check")
    print("\n".join(errors) if errors else "ok")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
