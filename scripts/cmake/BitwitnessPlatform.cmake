# Refuses hosts for which the formats and the arithmetic are not defined.
include(TestBigEndian)
test_big_endian(BITWITNESS_BIG_ENDIAN)
if(BITWITNESS_BIG_ENDIAN)
  message(FATAL_ERROR "Bitwitness: committed bytes are little-endian and read in place; a big-endian host is not supported.")
endif()
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  message(FATAL_ERROR "Bitwitness: models are memory-mapped whole; a 32-bit host is not supported.")
endif()
