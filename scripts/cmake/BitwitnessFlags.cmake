# bw_flags: the one place that carries the flags on which equal bits depend (kernels/ARITHMETIC.md,
# "Rules"), and the warnings. Every target of ours links it; no third-party target does.
add_library(bw_flags INTERFACE)
target_compile_features(bw_flags INTERFACE cxx_std_20)
target_include_directories(bw_flags INTERFACE ${PROJECT_SOURCE_DIR})

# Warnings are errors with the compilers that this tree is tried with; what a newer one warns of in addition
# must not keep anybody from building.
set(_bw_werror -Werror)
if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 15)
   OR (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 15))
  set(_bw_werror)
endif()

set(_bw_cxx
    -ffp-contract=off  # FMA only where the contract writes fma
    -fno-fast-math -fno-math-errno
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor
    -Wold-style-cast -Wcast-align -Wnull-dereference ${_bw_werror})
target_compile_options(bw_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${_bw_cxx}>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positives of g++ in the standard library's own headers at -O2/-O3.
  target_compile_options(bw_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-null-dereference;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-array-bounds>")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # The second takes every function that gets a temporary and returns a reference for a dangling one.
    target_compile_options(bw_flags INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wno-free-nonheap-object;-Wno-dangling-reference>")
  endif()
endif()
# nvcc: no fused multiply-add unless written, subnormals kept, IEEE division and square root.
target_compile_options(bw_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--ftz=false;--prec-div=true;--prec-sqrt=true;--Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off>")

if(BITWITNESS_SANITIZE)
  target_compile_options(bw_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${BITWITNESS_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  target_link_options(bw_flags INTERFACE "-fsanitize=${BITWITNESS_SANITIZE}")
endif()

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
