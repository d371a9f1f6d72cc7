// SPDX-License-Identifier: Apache-2.0
// What the kernels of each instruction set offer to the handlers. One table for each set; `best` picks at load time.
//
// A matrix [k, n] is packed into panels of `panel` columns, [ceil(n / panel)][k][panel], filled up with zeros; for
// bfloat16, [ceil(n / panel)][ceil(k / depth)] tiles (amx.cc).

#ifndef JGR_NATIVE_KERNELS_H_
#define JGR_NATIVE_KERNELS_H_

#include <cstdint>

namespace jgr {

using Bfloat16 = uint16_t;  // its bits

// The least and greatest value of a block's real tokens, and the union and intersection of their bits.
struct Bounds {
  int32_t request[2], segment[2], order[2];
  int32_t any, common;    // kinds of keys; for queries what is seen anywhere
  int32_t any_earlier, common_earlier;
  int32_t lowest[2];
  bool real, all_real;
};

// A call of segment attention; shapes as in jgr.ops.segment_attention, vectors [batch, tokens] int32.
template <class Type>
struct Attention {
  const Type *q, *k, *v;
  const int32_t *q_request, *q_segment, *q_order, *q_sees, *q_earlier, *q_lowest;
  const int32_t *k_request, *k_segment, *k_order, *k_kind;
  const Type* arranged;  // values as `arrange` leaves them, block by block of each head
  Type* out;
  int64_t batch, queries, keys, heads, kv_heads, dim;
  const Bounds* key_bounds;  // [batch, key blocks]
};

// A call of beam attention; shapes as in jgr.ops.beam_attention. ancestors and widths may be any numbers.
template <class Type>
struct BeamAttention {
  const Type *q, *k, *v, *own_k, *own_v;
  const int32_t *lengths, *ancestors, *widths;
  const Type* arranged;  // as above
  Type* out;
  int64_t batch, width, tokens, slots, heads, kv_heads, dim;
};

// The projections in front of an attention, of rows [rows, hidden]; a row is a token. Null where there is none.
template <class Type>
struct Inputs {
  const int64_t* places;                   // the rows that are computed; kernels get a range of these
  const Type *h, *norm;
  const float *cos, *sin;                  // [rows, dim / 2]
  const Type *packed_q, *packed_k, *packed_v;
  const Type *bias_q, *bias_k, *bias_v, *norm_q, *norm_k;
  Type *q, *k, *v;                         // q [batch, tokens, heads, dim]; k, v [batch, kv_heads, tokens, dim]
  int64_t tokens, hidden, heads, kv_heads, dim;
  float eps;
};

// What follows an attention, of rows [rows, hidden]: its output matrix and the gated MLP, each added to h.
template <class Type>
struct Output {
  const int64_t* places;                   // as in Inputs
  const Type *h, *attended, *norm;
  const Type *packed_o, *packed_gate, *packed_up, *packed_down;
  Type* out;
  int64_t inner, hidden, mlp;              // inner: columns of attended
  float eps;
};

// Rows [rows, depth] times a packed matrix [depth, columns]: out [rows, columns].
template <class Type>
struct Dense {
  const Type *x, *packed;
  Type* out;
  int64_t depth, columns;
};

// The products of every row of hidden [rows, dim] with every one of heads [columns, dim]: out [rows, columns].
template <class Type>
struct Logits {
  const Type* heads;
  const Type* arranged;  // hidden as `arrange_rows` leaves it
  float* out;
  int64_t rows, columns, dim;
};

// The numbers of a matrix [rows, columns] as they lie in memory: of the type of all else, or of 8 bits, which are times
// the factor of their column.
enum class Number { kSame, kInt8, kFp8 };

struct Stored {
  const void* numbers;
  Number type;
  const float* scale;  // [columns]; null where it is kSame
};

template <class Type>
struct Kernels {
  const char* name;
  int panel;      // columns of a panel
  int depth;      // a packed matrix has a multiple of so many rows
  int row_tile;   // rows of a tile of the matmuls; ranges of rows are multiples of it
  int lanes;      // rows (queries times heads of a group) of a block of attention
  int key_block;  // keys of a block of attention
  void (*pack)(const Stored&, int64_t rows, int64_t columns, int64_t panel, Type* packed);
  // `count` values [count][dim] of a block as attention wants them, in [key_block * dim]; null where it takes v itself.
  // request: below 0 for keys that are not there; null where all are.
  void (*arrange)(const Type* values, const int32_t* request, int64_t count, int64_t dim, Type* arranged);
  int64_t (*attention_room)(const Attention<Type>&);  // floats of working memory for a block, and for a range of rows
  void (*attend)(const Attention<Type>&, int64_t row, int64_t kv_head, int64_t block, float* room);
  int64_t (*beams_room)(const BeamAttention<Type>&);
  void (*attend_beams)(const BeamAttention<Type>&, int64_t row, int64_t kv_head, int64_t block, float* room);
  int64_t (*inputs_room)(const Inputs<Type>&, int64_t rows);
  void (*inputs)(const Inputs<Type>&, int64_t first, int64_t rows, float* room);
  int64_t (*output_room)(const Output<Type>&, int64_t rows);
  void (*output)(const Output<Type>&, int64_t first, int64_t rows, float* room);
  // The rest is null where it is left to XLA.
  int64_t (*dense_room)(const Dense<Type>&, int64_t rows);
  void (*dense)(const Dense<Type>&, int64_t first, int64_t rows, float* room);
  // Rows [rows, dim], `panel` at most, as `logits` wants them, in [panel * dim].
  void (*arrange_rows)(const Type* from, int64_t rows, int64_t dim, Type* arranged);
  void (*logits)(const Logits<Type>&, int64_t first, int64_t columns);
  int64_t (*mass_room)(const Attention<Type>&);
  // v and out are not used.
  void (*give)(const Attention<Type>&, int64_t row, int64_t kv_head, int64_t block, float* room, float* mass,
               int32_t* seers);
};

extern const Kernels<float> kAvx2, kAvx512, kGeneric;
extern const Kernels<Bfloat16> kAmx;

}  // namespace jgr

#endif  // JGR_NATIVE_KERNELS_H_
