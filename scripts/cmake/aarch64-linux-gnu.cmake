# Toolchain file: AArch64 Linux from another machine, with the cross compiler and the multiarch libraries of
# Debian (scripts/setup.sh test installs both). Tests run under qemu-aarch64 where that is installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(_bw_triple aarch64-linux-gnu)
set(CMAKE_CXX_COMPILER ${_bw_triple}-g++ CACHE STRING "C++ compiler")
set(CMAKE_CXX_COMPILER_TARGET ${_bw_triple})  # for clang++; g++ has it in its name
set(CMAKE_LIBRARY_ARCHITECTURE ${_bw_triple})

# Libraries of the target alone; headers that suit both lie in /usr/include and /usr/share.
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/${_bw_triple}/pkgconfig:/usr/share/pkgconfig)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

find_program(BITWITNESS_QEMU_AARCH64 NAMES qemu-aarch64 qemu-aarch64-static)
mark_as_advanced(BITWITNESS_QEMU_AARCH64)
if(BITWITNESS_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${BITWITNESS_QEMU_AARCH64})
endif()
