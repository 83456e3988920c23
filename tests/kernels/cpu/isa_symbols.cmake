# Fails if an object of one instruction set in ARCHIVE defines anything for the linker but its table: an
# inline function compiled there could take the place of its twin that every processor must run.
execute_process(COMMAND ${NM} --defined-only --print-file-name ${ARCHIVE}
  OUTPUT_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "nm failed on ${ARCHIVE}")
endif()
string(REPLACE "\n" ";" lines "${output}")
set(tables 0)
foreach(line IN LISTS lines)
  if(line MATCHES "kernels_avx[0-9]+\\.cc\\.o: *[0-9a-f]* ([A-Za-z]) (.*)$")
    set(kind ${CMAKE_MATCH_1})
    set(symbol ${CMAKE_MATCH_2})
    if(symbol MATCHES "kCpuKernelsAvx[0-9]+")
      math(EXPR tables "${tables} + 1")
    elseif(NOT kind MATCHES "^[tdrbn]$" AND NOT symbol MATCHES "^DW\\.ref\\.")  # pointers of unwind tables
      message(SEND_ERROR "visible symbol: ${line}")
    endif()
  endif()
endforeach()
if(NOT tables EQUAL 2)
  message(FATAL_ERROR "expected 2 kernel tables in ${ARCHIVE}, found ${tables}")
endif()
