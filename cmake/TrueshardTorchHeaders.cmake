# SPDX-License-Identifier: BSD-3-Clause
# TRUESHARD_PRECOMPILE_TORCH: programs (tests, examples) that are compiled with -O1 and the project's rules share one precompiled
# <torch/torch.h>. The library goes without: each of its files names what it uses.
include_guard(GLOBAL)

if(TRUESHARD_PRECOMPILE_TORCH)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/torch_headers.cpp "int main() { return 0; }\n")
  add_executable(trueshard_torch_headers EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/torch_headers.cpp)
  target_link_libraries(trueshard_torch_headers PRIVATE trueshard_compile_rules trueshard::torch_cpu)
  target_compile_options(trueshard_torch_headers PRIVATE -O1)
  target_precompile_headers(trueshard_torch_headers PRIVATE <torch/torch.h>)
endif()

function(trueshard_use_torch_headers target)
  if(TRUESHARD_PRECOMPILE_TORCH)
    target_precompile_headers(${target} REUSE_FROM trueshard_torch_headers)
  endif()
endfunction()
