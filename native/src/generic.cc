// SPDX-License-Identifier: Apache-2.0
// For processors without AVX2: vectors of 16 bytes, which x86-64 and aarch64 always have.
#define LANES 4
#if defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define TABLE kGeneric
#define NAME "generic"
#include "kernels.inc"
