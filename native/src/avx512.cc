// SPDX-License-Identifier: Apache-2.0
#define LANES 16
#define VECTORS 4
#define TABLE kAvx512
#define NAME "avx512"
#include "kernels.inc"
