# SPDX-License-Identifier: BSD-3-Clause
# Imported targets for the libtorch inside an installed torch wheel, CPU or CUDA: trueshard::c10, trueshard::torch_cpu.
# find_package(Torch) is not used: it is a fatal error on a CUDA wheel without the CUDA toolkit, and sets no C++ standard.
# Input: TRUESHARD_TORCH_DIR (the `torch` package folder), or Python3_EXECUTABLE / python3 that can import torch.
# Output: TRUESHARD_TORCH_DIR, TRUESHARD_TORCH_VERSION ("2.13.0+cpu").
# Also installed, next to trueshardConfig.cmake: it runs once per find_package() and must not mind being run again.

if(NOT TRUESHARD_TORCH_DIR)
  if(NOT Python3_EXECUTABLE)
    find_program(Python3_EXECUTABLE NAMES python3 python REQUIRED)
  endif()
  # Second try: without PYTHONPATH, by which pip hides the environment from a build; its torch is the one to build against.
  foreach(_trueshard_flag -B -E)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" ${_trueshard_flag} -c
        "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s else '')"
      OUTPUT_VARIABLE TRUESHARD_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _trueshard_rc)
    if(TRUESHARD_TORCH_DIR)
      break()
    endif()
  endforeach()
  if(NOT _trueshard_rc EQUAL 0 OR NOT TRUESHARD_TORCH_DIR)
    message(FATAL_ERROR
      "trueshard: ${Python3_EXECUTABLE} has no torch package. "
      "Install it (pip install torch==2.13.0) and pass -DPython3_EXECUTABLE=<that python>, "
      "or pass -DTRUESHARD_TORCH_DIR=<folder of the torch package>.")
  endif()
  # Only what was found here is kept: a package that brings its own default (trueshardConfig.cmake) may change it later.
  set(TRUESHARD_TORCH_DIR "${TRUESHARD_TORCH_DIR}" CACHE PATH "The folder of the installed torch package" FORCE)
endif()

set(_trueshard_version_file "${TRUESHARD_TORCH_DIR}/version.py")
if(NOT EXISTS "${_trueshard_version_file}" OR NOT EXISTS "${TRUESHARD_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "trueshard: no libtorch in '${TRUESHARD_TORCH_DIR}' (expected version.py and lib/libtorch_cpu.so)")
endif()
file(STRINGS "${_trueshard_version_file}" _trueshard_version_line REGEX "^__version__")
string(REGEX REPLACE ".*['\"]([^'\"]+)['\"].*" "\\1" TRUESHARD_TORCH_VERSION "${_trueshard_version_line}")

foreach(_library c10 torch_cpu torch torch_python)
  if(NOT TARGET trueshard::${_library})
    add_library(trueshard::${_library} SHARED IMPORTED GLOBAL)
    set_target_properties(trueshard::${_library} PROPERTIES
      IMPORTED_LOCATION "${TRUESHARD_TORCH_DIR}/lib/lib${_library}.so")
  endif()
endforeach()
# NDEBUG in every configuration: libtorch was built with it, and RecordFunction asserts otherwise.
set_target_properties(trueshard::torch_cpu PROPERTIES
  INTERFACE_LINK_LIBRARIES trueshard::c10
  INTERFACE_COMPILE_FEATURES cxx_std_20
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;NDEBUG"
  INTERFACE_INCLUDE_DIRECTORIES "${TRUESHARD_TORCH_DIR}/include;${TRUESHARD_TORCH_DIR}/include/torch/csrc/api/include"
  INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TRUESHARD_TORCH_DIR}/include;${TRUESHARD_TORCH_DIR}/include/torch/csrc/api/include")
set_target_properties(trueshard::torch_python PROPERTIES INTERFACE_LINK_LIBRARIES trueshard::torch_cpu)
set_target_properties(trueshard::torch PROPERTIES INTERFACE_LINK_LIBRARIES trueshard::torch_cpu)
