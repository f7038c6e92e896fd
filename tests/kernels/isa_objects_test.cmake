# SPDX-License-Identifier: BSD-3-Clause
# cmake -DNM=... -DSPACE=cpu_avx2 -DOBJECTS=a.o|b.o -P isa_objects_test.cmake
# A function compiled for AVX must not carry a name that other translation units define too: the linker keeps one copy, and
# a processor without AVX would run it. Every symbol these objects export lies in their own namespace.
string(REPLACE "|" ";" objects "${OBJECTS}")
list(LENGTH objects object_count)
if(object_count EQUAL 0)
  message(FATAL_ERROR "no objects given for ${SPACE}")
endif()
set(own 0)
foreach(object ${objects})
  execute_process(COMMAND "${NM}" -C --defined-only --extern-only "${object}" OUTPUT_VARIABLE text RESULT_VARIABLE rc)
  if(NOT rc EQUAL 0)
    message(FATAL_ERROR "${NM} cannot read ${object}")
  endif()
  string(REPLACE ";" "," text "${text}")
  string(REPLACE "\n" ";" lines "${text}")
  foreach(line ${lines})
    if(line MATCHES "trueshard::kernels::${SPACE}::")
      math(EXPR own "${own} + 1")
    elseif(NOT line MATCHES " V DW\\.ref\\.")  # data: a pointer to the unwinder, in builds with sanitizers
      message(SEND_ERROR "${object} exports a symbol outside trueshard::kernels::${SPACE}: ${line}")
    endif()
  endforeach()
endforeach()
if(own LESS object_count)
  message(FATAL_ERROR "${SPACE}: ${own} symbols in ${object_count} objects; the check looked at the wrong files")
endif()
