# SPDX-License-Identifier: BSD-3-Clause
# The header-only JSON library that checkpoints are written and read with; nothing of it is installed.
# Input: TRUESHARD_JSON_DIR (the folder that holds nlohmann/json.hpp), or it is looked for: in the system's include folders and
# CMAKE_PREFIX_PATH, then in Python3_EXECUTABLE's packages (pip install nlohmann-json). Output: TRUESHARD_JSON_DIR.
include_guard(GLOBAL)

find_path(TRUESHARD_JSON_DIR nlohmann/json.hpp DOC "The folder that holds nlohmann/json.hpp")
if(NOT TRUESHARD_JSON_DIR AND Python3_EXECUTABLE)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
      "import importlib.util as u, os; s = u.find_spec('nlohmann_json'); print(os.path.dirname(s.origin) if s else '')"
    OUTPUT_VARIABLE _trueshard_json OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_trueshard_json)
    find_path(TRUESHARD_JSON_DIR nlohmann/json.hpp PATHS "${_trueshard_json}/include" NO_DEFAULT_PATH)
  endif()
endif()
if(NOT TRUESHARD_JSON_DIR)
  message(FATAL_ERROR
    "trueshard: nlohmann/json.hpp was not found. Install it (Debian, Ubuntu: apt install nlohmann-json3-dev; "
    "or pip install nlohmann-json for the Python given by Python3_EXECUTABLE), "
    "or pass -DTRUESHARD_JSON_DIR=<folder that holds nlohmann/json.hpp>.")
endif()
