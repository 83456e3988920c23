// Marks functions that nvcc compiles for the host and for the device alike.
#pragma once

#if defined(__CUDACC__)
#define BW_HD __host__ __device__
#else
#define BW_HD
#endif
