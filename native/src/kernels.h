// SPDX-License-Identifier: Apache-2.0
// What the kernels of each instruction set offer to the handlers. One table for each set; `best` picks at load time.
//
// A matrix [k, n] is packed into panels of `panel` columns, [ceil(n / panel)][k][panel], filled up with zeros.

#ifndef JGR_NATIVE_KERNELS_H_
#define JGR_NATIVE_KERNELS_H_

#include <cstdint>

namespace jgr {

// The least and greatest value of a block's real tokens, and the union and intersection of their bits.
struct Bounds {
  int32_t request[2], segment[2], order[2];
  int32_t any, common;    // kinds of keys; for queries what is seen anywhere
  int32_t any_earlier, common_earlier;
  int32_t lowest[2];
  bool real, all_real;
};

// A call of segment attention; shapes as in jgr.ops.segment_attention, vectors [batch, tokens] int32.
struct Attention {
  const float *q, *k, *v;
  const int32_t *q_request, *q_segment, *q_order, *q_sees, *q_earlier, *q_lowest;
  const int32_t *k_request, *k_segment, *k_order, *k_kind;
  float* out;
  int64_t batch, queries, keys, heads, kv_heads, dim;
  const Bounds* key_bounds;  // [batch, key blocks]
};

// The projections in front of an attention, of rows [rows, hidden]; a row is a token. Null where there is none.
struct Inputs {
  const int64_t* places;                   // the rows that are computed; kernels get a range of these
  const float *h, *norm, *cos, *sin;       // cos, sin: [rows, dim / 2]
  const float *packed_q, *packed_k, *packed_v;
  const float *bias_q, *bias_k, *bias_v, *norm_q, *norm_k;
  float *q, *k, *v;                        // q [batch, tokens, heads, dim]; k, v [batch, kv_heads, tokens, dim]
  int64_t tokens, hidden, heads, kv_heads, dim;
  float eps;
};

// What follows an attention, of rows [rows, hidden]: its output matrix and the gated MLP, each added to h.
struct Output {
  const int64_t* places;                   // as in Inputs
  const float *h, *attended, *norm;
  const float *packed_o, *packed_gate, *packed_up, *packed_down;
  float* out;
  int64_t inner, hidden, mlp;              // inner: columns of attended
  float eps;
};

// The numbers of a matrix [rows, columns] as they lie in memory. Those of 8 bits are times the factor of their column.
enum class Number { kFloat, kInt8, kFp8 };

struct Stored {
  const void* numbers;
  Number type;
  const float* scale;  // [columns]; null for floats
};

struct Kernels {
  const char* name;
  int panel;      // columns of a panel, and rows (queries times heads of a group) of a block of attention
  int key_block;  // keys of a block of attention
  void (*pack)(const Stored&, int64_t rows, int64_t columns, int64_t panel, float* packed);
  int64_t (*attention_room)(const Attention&);  // floats of working memory for a block, and for a range of rows
  void (*attend)(const Attention&, int64_t row, int64_t kv_head, int64_t block, float* room);
  int64_t (*inputs_room)(const Inputs&, int64_t rows);
  void (*inputs)(const Inputs&, int64_t first, int64_t rows, float* room);
  int64_t (*output_room)(const Output&, int64_t rows);
  void (*output)(const Output&, int64_t first, int64_t rows, float* room);
};

constexpr int kRowTile = 6;  // rows of a tile of the matmuls; ranges of rows are multiples of it

extern const Kernels kAvx2, kAvx512, kGeneric;

}  // namespace jgr

#endif  // JGR_NATIVE_KERNELS_H_
