# SPDX-License-Identifier: BSD-3-Clause
# Compile rules that hold for every target of the project. `trueshard_compile_rules` is linked PRIVATE.
include_guard(GLOBAL)

if(CMAKE_CXX_FLAGS MATCHES "-ffast-math|-Ofast|-funsafe-math-optimizations|-ffp-contract=fast")
  message(FATAL_ERROR "trueshard: fast-math changes the bits this library promises; remove it from CMAKE_CXX_FLAGS")
endif()

add_library(trueshard_compile_rules INTERFACE)
target_compile_options(trueshard_compile_rules INTERFACE
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wunused -Wconversion -Wno-sign-conversion
  -ffp-contract=off   # docs/numerics.md: GCC contracts a*b+c to fma otherwise, which changes bits
  -fvisibility=hidden -fvisibility-inlines-hidden)
if(TRUESHARD_WERROR)
  # GCC 12 sees overlapping copies in std::string's own assignment (its bug 105651): a warning here, never an error.
  target_compile_options(trueshard_compile_rules INTERFACE -Werror -Wno-error=restrict)
endif()

if(TRUESHARD_SANITIZE STREQUAL "address")
  target_compile_options(trueshard_compile_rules INTERFACE -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer -g1)
  target_link_options(trueshard_compile_rules INTERFACE -fsanitize=address,undefined)
elseif(TRUESHARD_SANITIZE STREQUAL "thread")
  target_compile_options(trueshard_compile_rules INTERFACE -fsanitize=thread -g1)
  target_link_options(trueshard_compile_rules INTERFACE -fsanitize=thread)
elseif(TRUESHARD_SANITIZE)
  message(FATAL_ERROR "trueshard: TRUESHARD_SANITIZE is '${TRUESHARD_SANITIZE}'; expected empty, address or thread")
endif()
