// SPDX-License-Identifier: Apache-2.0
#define LANES 8
#define VECTORS 2
#define TABLE kAvx2
#define NAME "avx2"
#include "kernels.inc"
