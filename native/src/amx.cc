// SPDX-License-Identifier: Apache-2.0
// The kernels for bfloat16 on processors with AMX: all products on its tiles, summed in float; all between them in float,
// where a softmax's weights and a gate are as exact as bfloat16 shows.
//
// A tile is 16 rows of 64 bytes. A product takes 16 rows of 32 numbers of a, and 16 rows of b that hold 16 pairs of
// numbers: two rows of a matrix, column by column. Four tiles of sums are in work at a time, of 32 rows and 32 columns.
// As in blocks.inc a block's queries stand in lanes: a product's rows are keys, or dimensions of values.

#include <immintrin.h>

#include "kernels.h"

#define LANES 16
#define VECTORS 4
#define BFLOATS

namespace jgr {
namespace {

#include "vectors.inc"
#include "blocks.inc"

constexpr int kRows = 32, kColumns = 32, kDeep = 32;  // of a block of sums, and what a product takes of a row of a
constexpr int kTile = 512;                            // numbers of a tile of a or b

// A stride between rows of numbers of a: a multiple of a tile's row, and no power of two.
inline int64_t row_stride(int64_t columns) { return padded(columns, kDeep) + kDeep; }
inline int64_t floats(int64_t numbers) { return padded(numbers, 32) / 2; }
inline Bfloat16* numbers(float* room) { return reinterpret_cast<Bfloat16*>(room); }

// All tiles of this thread have 16 rows of 64 bytes, until the end of a kernel.
class Tiles {
 public:
  Tiles() {
    static constexpr struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));  // GCC's own function tells the compiler of its first 8 bytes alone
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// The compiler knows nothing of tiles, so it may not move what is in memory across these.
template <int TILE>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void read(const void* from, int64_t bytes_apart) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes_apart), "i"(TILE) : "memory");
}
template <int TILE>
inline void write(void* to, int64_t bytes_apart) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes_apart), "i"(TILE) : "memory");
}
// SUMS += A B.
template <int SUMS, int A, int B>
inline void add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// sums [32][32] = a b, of 32 rows of a, or of 16 where `half`. b: for every 32 numbers of depth a tile of 16 columns and
// one of the next 16.
inline void multiply(bool half, int64_t depth, const Bfloat16* a, int64_t lda, const Bfloat16* b, float* sums) {
  const int64_t step = lda * sizeof(Bfloat16), apart = kColumns * sizeof(float);
  clear<0>(), clear<1>();
  if (half) {
    for (int64_t k = 0; k < depth; k += kDeep, b += 2 * kTile) {
      read<4>(a + k, step);
      read<6>(b, 64), read<7>(b + kTile, 64);
      add<0, 4, 6>(), add<1, 4, 7>();
    }
    write<0>(sums, apart), write<1>(sums + 16, apart);
    return;
  }
  clear<2>(), clear<3>();
  for (int64_t k = 0; k < depth; k += kDeep, b += 2 * kTile) {
    read<4>(a + k, step), read<6>(b, 64);
    add<0, 4, 6>();
    read<7>(b + kTile, 64);
    add<1, 4, 7>();
    read<5>(a + 16 * lda + k, step);
    add<2, 5, 6>(), add<3, 5, 7>();
  }
  write<0>(sums, apart), write<1>(sums + 16, apart);
  write<2>(sums + 16 * kColumns, apart), write<3>(sums + 16 * kColumns + 16, apart);
}

// a packed, for `columns` filled up to whole panels; last(row, column, sum) takes 16 sums of a row. Of a, rows up to a
// multiple of 16 are read, and numbers up to a multiple of 32.
template <class Last>
void product(int64_t rows, int64_t depth, int64_t columns, const Bfloat16* a, int64_t lda, const Bfloat16* packed,
             Last last) {
  alignas(64) float sums[kRows * kColumns];
  const int64_t whole = padded(depth, kDeep);
  for (int64_t column = 0; column < columns; column += kColumns, packed += kColumns * whole)
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = least(kRows, rows - row);
      multiply(count <= 16, whole, a + row * lda, lda, packed, sums);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < kColumns; j += LANES) last(row + i, column + j, load(sums + i * kColumns + j));
    }
}

// The numbers of a row of a that are read and are not there.
inline void fill_up(Bfloat16* row, int64_t columns) {
  for (int64_t i = columns; i < padded(columns, kDeep); ++i) row[i] = 0;
}

// ---- arranging ---------------------------------------------------------------------------------------------------

inline __m512i numbers_at(const Bfloat16* p) { return _mm512_loadu_si512(p); }

// Pairs of the same column of two rows, as they stand in a tile: of columns 0 to 15, and of 16 to 31.
inline void pair_up(__m512i first, __m512i second, Bfloat16* low, Bfloat16* high) {
  alignas(64) static constexpr int16_t order[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(first, _mm512_load_si512(order), second));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(first, _mm512_load_si512(order + 32), second));
}

// 16 rows of 16 words of 32 bits, turned.
inline void turn(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

// 16 rows of 16 words, from(row), turned: to(column, words) takes each column.
template <class From, class To>
inline void turn_from(From from, To to) {
  __m512i x[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = from(i);
  turn(x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) to(i, x[i]);
}

// `count` numbers of a row of a matrix, the others 0; those of 8 bits are times their factors.
inline __m512i row_of(const Stored& matrix, int64_t row, int64_t columns, int64_t first, int64_t count) {
  if (matrix.type == Number::kSame) {
    const Bfloat16* from = static_cast<const Bfloat16*>(matrix.numbers) + row * columns + first;
    return _mm512_maskz_loadu_epi16(count == kColumns ? ~0u : (1u << count) - 1, from);
  }
  alignas(64) float wide[kColumns] = {};
  const int64_t at = row * columns + first;
  for (int64_t j = 0; j < count; ++j) {
    const float x = matrix.type == Number::kInt8 ? number(static_cast<const int8_t*>(matrix.numbers)[at + j])
                                                 : number(static_cast<const uint8_t*>(matrix.numbers)[at + j]);
    wide[j] = x * matrix.scale[first + j];
  }
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(wide + LANES), (__m512)load(wide));
}

void pack(const Stored& matrix, int64_t rows, int64_t columns, int64_t panel, Bfloat16* packed) {
  const int64_t first = panel * kColumns, count = least(kColumns, columns - first);
  Bfloat16* to = packed + first * padded(rows, kDeep);
  for (int64_t k = 0; k < padded(rows, kDeep); k += 2) {
    const __m512i none = _mm512_setzero_si512();
    const __m512i one = k < rows ? row_of(matrix, k, columns, first, count) : none;
    const __m512i two = k + 1 < rows ? row_of(matrix, k + 1, columns, first, count) : none;
    Bfloat16* const at = to + k / kDeep * 2 * kTile + k % kDeep / 2 * 32;
    pair_up(one, two, at, at + kTile);
  }
}

// A block of `count` values [count][dim], turned: for 16 dimensions after the other a tile of every 32 keys, [16][32].
// Keys that are not there, or whose request is below 0, have values of 0, whatever stands there.
void arrange(const Bfloat16* values, const int32_t* request, int64_t count, int64_t dim, Bfloat16* to) {
  const auto value = [&](int64_t key, int64_t first) {
    const bool real = key < count && (request == nullptr || request[key] >= 0);
    return real ? numbers_at(values + key * dim + first) : _mm512_setzero_si512();
  };
  constexpr int64_t of_dim = kKeyBlock * 16;  // numbers for 16 dimensions
  for (int64_t key = 0; key < padded(count, kDeep); key += kDeep)
    for (int64_t first = 0; first < dim; first += 32) {
      alignas(64) Bfloat16 pairs[2][16][32];
      for (int i = 0; i < 16; ++i)
        pair_up(value(key + 2 * i, first), value(key + 2 * i + 1, first), pairs[0][i], pairs[1][i]);
      for (int half = 0; half < 2; ++half) {
        Bfloat16* const tile = to + (first / 16 + half) * of_dim + key * 16;
        turn_from([&](int i) { return numbers_at(pairs[half][i]); },
                  [=](int i, __m512i x) { _mm512_storeu_si512(tile + i * 32, x); });
      }
    }
}

// Queries of lanes, from(lane), as pairs of dimensions [dim / 2][panel]. Null: zeros.
template <class From>
inline void arrange_queries(int64_t dim, From from, Bfloat16* q) {
  for (int lane = 0; lane < kPanel; lane += 16)
    for (int64_t first = 0; first < dim; first += 32) {
      const auto dims = [&](int i) {
        const Bfloat16* const at = from(lane + i);
        return at == nullptr ? _mm512_setzero_si512() : numbers_at(at + first);
      };
      turn_from(dims, [=](int i, __m512i x) { _mm512_storeu_si512(q + (first / 2 + i) * 2 * kPanel + 2 * lane, x); });
    }
}

// ---- attention ---------------------------------------------------------------------------------------------------

// Scores begin above those of keys that are not seen, so that these have no weight even where nothing else is there.
constexpr float kLowest = -1e20f;

// 2^x with a relative error of 1e-4, of which bfloat16 shows nothing; 2^-126 for what is less.
inline Vec rough_exp2(Vec x) {
  const float magic = 12582912.0f;
  const Vec clamped = max(x, splat(-126.0f)), shifted = clamped + magic, rest = clamped - (shifted - magic);
  Vec y = splat(5.5904e-2f);
  y = y * rest + 2.4263e-1f;
  y = y * rest + 6.93121e-1f;
  y = y * rest + 9.99925e-1f;
  return (Vec)((Int)y + ((Int)shifted << 23));
}

// The working memory of a block: q [dim / 2][panel] pairs, out [dim][panel], scores and weights of a block of keys, and
// a copy of the last keys.
struct Room {
  Bfloat16* q;
  float *out, *scores;
  Bfloat16 *weights, *keys;
};

inline int64_t block_room(int64_t dim) {
  return floats(dim * kPanel) + dim * kPanel + kKeyBlock * kPanel + floats(kKeyBlock * kPanel) + floats(kKeyBlock * dim);
}

inline Room divide(float* room, int64_t dim) {
  Room made;
  made.q = numbers(room), room += floats(dim * kPanel);
  made.out = room, room += dim * kPanel;
  made.scores = room, room += kKeyBlock * kPanel;
  made.weights = numbers(room), room += floats(kKeyBlock * kPanel);
  made.keys = numbers(room);
  return made;
}

// Of `rows` rows of a, a multiple of 32, and lanes: to [rows][panel] = a b, added to what is there where ADD.
// a_at(row, k): the tile of 16 rows; `step` bytes between its rows. b: pairs [depth / 2][panel].
template <bool ADD, class At>
inline void multiply_lanes(int64_t rows, int64_t depth, At a_at, int64_t step, const Bfloat16* b, float* to) {
  constexpr int64_t apart = kPanel * sizeof(float);
  for (int64_t row = 0; row < rows; row += 32)
    for (int lane = 0; lane < kPanel; lane += 32) {
      float *const one = to + row * kPanel + lane, *const two = one + 16 * kPanel;
      if (ADD) {
        read<0>(one, apart), read<1>(one + 16, apart);
        read<2>(two, apart), read<3>(two + 16, apart);
      } else {
        clear<0>(), clear<1>(), clear<2>(), clear<3>();
      }
      for (int64_t k = 0; k < depth; k += kDeep) {
        const Bfloat16* const pairs = b + k * kPanel + 2 * lane;
        read<4>(a_at(row, k), step), read<5>(a_at(row + 16, k), step);
        read<6>(pairs, apart), read<7>(pairs + 32, apart);
        add<0, 4, 6>(), add<1, 4, 7>(), add<2, 5, 6>(), add<3, 5, 7>();
      }
      write<0>(one, apart), write<1>(one + 16, apart);
      write<2>(two, apart), write<3>(two + 16, apart);
    }
}

// As in kernels.inc, of `count` keys, of which `there` may be read, and their arranged values. Where ALL, every lane sees
// every key, and count is a multiple of 32. Scores, and `top` too, are still to be multiplied with `scale`.
template <bool ALL, class Shown>
inline void mix(int64_t count, int64_t there, int64_t dim, const Bfloat16* keys, const Bfloat16* values, float scale,
                const Room& room, Vec (&top)[VECTORS], Vec (&total)[VECTORS], Shown shown) {
  const int64_t rows = padded(count, kDeep);
  if (rows > there) {
    for (int64_t i = 0; i < rows * dim; ++i) room.keys[i] = i < count * dim ? keys[i] : 0;
    keys = room.keys;
  }
  multiply_lanes<false>(
      rows, dim, [=](int64_t row, int64_t k) { return keys + row * dim + k; }, dim * sizeof(Bfloat16), room.q,
      room.scores);

  Vec highest[VECTORS];
  for (int j = 0; j < VECTORS; ++j) highest[j] = top[j];
  for (int64_t key = 0; key < rows; ++key)
    for (int j = 0; j < VECTORS; ++j) {
      float* const cell = room.scores + key * kPanel + j * LANES;
      Vec x = load(cell);
      if constexpr (!ALL) {
        x = key < count ? shown(key, j, x) : splat(kMasked);
        store(cell, x);
      }
      highest[j] = max(highest[j], x);
    }
  bool same = true;
  Vec shrink[VECTORS], shift[VECTORS];
  for (int j = 0; j < VECTORS; ++j) {
    shrink[j] = exp2((top[j] - highest[j]) * scale);
    same &= _mm512_cmp_ps_mask((__m512)top[j], (__m512)highest[j], _CMP_EQ_OQ) == 0xffff;
    total[j] *= shrink[j];
    top[j] = highest[j];
    shift[j] = highest[j] * scale;
  }
  alignas(64) static constexpr int16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  for (int64_t key = 0; key < rows; key += 2)
    for (int j = 0; j < VECTORS; ++j) {
      const float* const cell = room.scores + key * kPanel + j * LANES;
      const Vec one = rough_exp2(load(cell) * scale - shift[j]);
      const Vec two = rough_exp2(load(cell + kPanel) * scale - shift[j]);
      total[j] += one + two;
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)two, (__m512)one);
      _mm512_storeu_si512(room.weights + key * kPanel + 2 * j * LANES,
                          _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
    }
  if (!same)
    for (int64_t i = 0; i < dim; ++i)
      for (int j = 0; j < VECTORS; ++j) {
        float* const cell = room.out + i * kPanel + j * LANES;
        store(cell, load(cell) * shrink[j]);
      }
  multiply_lanes<true>(
      dim, rows, [=](int64_t row, int64_t k) { return values + row * kKeyBlock + k * 16; }, 64, room.weights, room.out);
}

// out [dim][panel], turned: row(lane, first, sums) gets 16 sums of a lane, from dimension `first` on.
template <class Row>
inline void turn_lanes(int64_t dim, const float* out, Row row) {
  for (int j = 0; j < VECTORS; ++j)
    for (int64_t first = 0; first < dim; first += 16)
      turn_from([=](int i) { return (__m512i)load(out + (first + i) * kPanel + j * LANES); },
                [&](int i, __m512i x) { row(j * LANES + i, first, (Vec)x); });
}

int64_t attention_room(const Attention<Bfloat16>& call) { return block_room(call.dim); }

void attend(const Attention<Bfloat16>& call, int64_t row, int64_t kv_head, int64_t block, float* memory) {
  const Tiles tiles;
  const int64_t dim = call.dim;
  const Room room = divide(memory, dim);
  Lanes lanes;
  const Bounds of_queries = describe(call, row, kv_head, block * kPanel, lanes);
  const auto at = [&](int64_t lane) {
    return ((row * call.queries + lanes.query[lane]) * call.heads + lanes.head[lane]) * dim;
  };
  const float scale = kLog2E / root(static_cast<float>(dim));
  arrange_queries(dim, [&](int lane) { return lanes.request[lane] < 0 ? nullptr : call.q + at(lane); }, room.q);
  for (int64_t i = 0; i < dim * kPanel; i += LANES) store(room.out + i, Vec{});
  Vec top[VECTORS], total[VECTORS];
  for (int j = 0; j < VECTORS; ++j) top[j] = splat(kLowest), total[j] = Vec{};

  const int64_t blocks = padded(call.keys, kKeyBlock) / kKeyBlock;
  for (int64_t part = 0; part < blocks; ++part) {
    const Bounds& of_keys = call.key_bounds[row * blocks + part];
    const Relation related = relation(of_queries, of_keys);
    if (related == kNothing) continue;
    const int64_t first = part * kKeyBlock, there = least(kKeyBlock, call.keys - first), vectors = row * call.keys + first;
    const int64_t head = row * call.kv_heads + kv_head;
    const int64_t count = last_seen(call, of_queries, of_keys, vectors, there);
    const Bfloat16* const keys = call.k + (head * call.keys + first) * dim;
    const Bfloat16* const values = call.arranged + (head * blocks + part) * kKeyBlock * dim;
    if (related == kAll && count % kDeep == 0) {
      mix<true>(count, there, dim, keys, values, scale, room, top, total, nullptr);
      continue;
    }
    mix<false>(count, there, dim, keys, values, scale, room, top, total, [&](int64_t key, int j, Vec x) {
      if (related == kAll) return x;
      const int64_t token = vectors + key;
      const Int visible = seen(lanes, j, call.k_request[token], call.k_segment[token], call.k_order[token],
                               call.k_kind[token]);
      return visible ? x : splat(kMasked);
    });
  }

  // What saw nothing may have NaN for a sum, which a factor of 0 does not remove.
  for (int j = 0; j < VECTORS; ++j) {
    const Int saw = (ints(lanes.request + j * LANES) >= 0) & (top[j] > kLowest);
    const Vec inverse = 1.0f / total[j];
    for (int64_t i = 0; i < dim; ++i) {
      float* const cell = room.out + i * kPanel + j * LANES;
      store(cell, saw ? load(cell) * inverse : Vec{});
    }
  }
  const int64_t left = call.queries * (call.heads / call.kv_heads) - block * kPanel;
  turn_lanes(dim, room.out, [&](int64_t lane, int64_t first, Vec x) {
    if (lane < left) puts(call.out + at(lane) + first, x);
  });
}

// ---- attention of beams ------------------------------------------------------------------------------------------

int64_t beams_room(const BeamAttention<Bfloat16>& call) { return block_room(call.dim) + (kSlots + call.dim) * kPanel; }

inline float dot(const Bfloat16* a, const Bfloat16* b, int64_t size) {
  Vec products{};
  for (int64_t i = 0; i < size; i += LANES) products += gets(a + i) * gets(b + i);
  return _mm512_reduce_add_ps((__m512)products);
}

void attend_beams(const BeamAttention<Bfloat16>& call, int64_t row, int64_t kv_head, int64_t block, float* memory) {
  const Tiles tiles;
  const int64_t dim = call.dim;
  const Beams<Bfloat16> beams(call, row, kv_head, block * kPanel);
  const Room room = divide(memory, dim);
  float *const own = memory + block_room(dim), *const rows = own + kSlots * kPanel;  // rows: [lane][dim]
  for (int64_t lane = beams.live; lane < beams.lanes; ++lane)
    for (int64_t i = 0; i < dim; ++i) call.out[beams.at(lane) + i] = 0;
  if (beams.live == 0) return;

  const float scale = kLog2E / root(static_cast<float>(dim));
  arrange_queries(dim, [&](int lane) { return lane < beams.live ? call.q + beams.at(lane) : nullptr; }, room.q);
  for (int64_t i = 0; i < dim * kPanel; i += LANES) store(room.out + i, Vec{});
  Vec top[VECTORS], total[VECTORS];
  for (int j = 0; j < VECTORS; ++j) top[j] = splat(kLowest), total[j] = Vec{};

  const int64_t head = row * call.kv_heads + kv_head, blocks = padded(call.tokens, kKeyBlock) / kKeyBlock;
  for (int64_t key = 0; key < beams.length; key += kKeyBlock) {
    const int64_t count = least(kKeyBlock, beams.length - key), there = least(kKeyBlock, call.tokens - key);
    const Bfloat16* const keys = call.k + (head * call.tokens + key) * dim;
    const Bfloat16* const values = call.arranged + (head * blocks * kKeyBlock + key) * dim;
    if (count == kKeyBlock)
      mix<true>(count, there, dim, keys, values, scale, room, top, total, nullptr);
    else
      mix<false>(count, there, dim, keys, values, scale, room, top, total, [](int64_t, int, Vec x) { return x; });
  }

  turn_lanes(dim, room.out, [&](int64_t lane, int64_t first, Vec x) { store(rows + lane * dim + first, x); });

  for (int64_t slot = 0; slot < call.slots; slot += kSlots) {
    const int64_t count = least(kSlots, call.slots - slot);
    for (int64_t s = 0; s < count; ++s)
      for (int64_t lane = 0; lane < kPanel; ++lane)
        own[s * kPanel + lane] =
            lane < beams.live ? dot(call.q + beams.at(lane), call.own_k + beams.own_at(slot + s, lane), dim) : 0.0f;
    alignas(64) float shrink[kPanel];
    for (int j = 0; j < VECTORS; ++j) {
      Vec highest = top[j];
      for (int64_t s = 0; s < count; ++s) highest = max(highest, load(own + s * kPanel + j * LANES));
      const Vec less = exp2((top[j] - highest) * scale);
      total[j] *= less;
      for (int64_t s = 0; s < count; ++s) {
        float* const cell = own + s * kPanel + j * LANES;
        const Vec weight = exp2((load(cell) - highest) * scale);
        total[j] += weight;
        store(cell, weight);
      }
      top[j] = highest;
      store(shrink + j * LANES, less);
    }
    for (int64_t lane = 0; lane < beams.live; ++lane) {
      float* const row = rows + lane * dim;
      for (int64_t i = 0; i < dim; i += LANES) store(row + i, load(row + i) * shrink[lane]);
      for (int64_t s = 0; s < count; ++s) {
        const Bfloat16* const value = call.own_v + beams.own_at(slot + s, lane);
        const float weight = own[s * kPanel + lane];
        for (int64_t i = 0; i < dim; i += LANES) store(row + i, load(row + i) + weight * gets(value + i));
      }
    }
  }
  for (int64_t lane = 0; lane < beams.live; ++lane) {
    const float inverse = 1.0f / total[lane / LANES][lane % LANES];
    Bfloat16* const to = call.out + beams.at(lane);
    for (int64_t i = 0; i < dim; i += LANES) puts(to + i, load(rows + lane * dim + i) * inverse);
  }
}

// ---- in front of an attention ------------------------------------------------------------------------------------

int64_t inputs_room(const Inputs<Bfloat16>& call, int64_t rows) {
  const int64_t widest = (call.heads > call.kv_heads ? call.heads : call.kv_heads) * call.dim;
  return floats(padded(rows, 16) * row_stride(call.hidden)) + rows * stride(widest);
}

void inputs(const Inputs<Bfloat16>& call, int64_t first, int64_t rows, float* room) {
  const Tiles tiles;
  const int64_t hidden = call.hidden, dim = call.dim, lda = row_stride(hidden);
  Bfloat16* const normed = numbers(room);
  float* const made = room + floats(padded(rows, 16) * lda);
  for (int64_t i = 0; i < rows; ++i) {
    rms_norm(call.h + call.places[first + i] * hidden, call.norm, hidden, call.eps, normed + i * lda);
    fill_up(normed + i * lda, hidden);
  }
  const auto project = [&](const Bfloat16* packed, const Bfloat16* bias, const Bfloat16* norm, bool turned, int64_t heads,
                           Bfloat16* out, bool by_heads) {
    const int64_t columns = heads * dim, ldm = stride(columns);
    product(rows, hidden, columns, normed, lda, packed,
            [=](int64_t i, int64_t j, Vec x) { store(made + i * ldm + j, x); });
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = call.places[first + i], batch = row / call.tokens, token = row % call.tokens;
      float* x = made + i * ldm;
      if (bias != nullptr)
        for (int64_t column = 0; column < columns; column += LANES)
          store(x + column, load(x + column) + gets(bias + column));
      const float *cos = turned ? call.cos + row * (dim / 2) : nullptr, *sin = call.sin + row * (dim / 2);
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t at = by_heads ? (batch * heads + head) * call.tokens + token : row * heads + head;
        finish_head(x + head * dim, norm, call.eps, cos, sin, dim, out + at * dim);
      }
    }
  };
  if (call.q != nullptr) project(call.packed_q, call.bias_q, call.norm_q, true, call.heads, call.q, false);
  project(call.packed_k, call.bias_k, call.norm_k, true, call.kv_heads, call.k, true);
  project(call.packed_v, call.bias_v, nullptr, false, call.kv_heads, call.v, true);
}

// ---- behind it ---------------------------------------------------------------------------------------------------

int64_t output_room(const Output<Bfloat16>& call, int64_t rows) {
  const int64_t whole = padded(rows, 16);
  return floats(whole * row_stride(call.inner)) + floats(whole * row_stride(call.hidden)) +
         floats(whole * row_stride(call.mlp)) + rows * stride(call.hidden);
}

inline Vec silu(Vec x) {
  const Vec below = 1.0f + rough_exp2(max(x, splat(-80.0f)) * -kLog2E);
  return x * (Vec)_mm512_rcp14_ps((__m512)below);
}

void output(const Output<Bfloat16>& call, int64_t first, int64_t rows, float* room) {
  const Tiles tiles;
  const int64_t hidden = call.hidden, ldi = row_stride(call.inner), ldn = row_stride(hidden), ldm = row_stride(call.mlp);
  const int64_t ldh = stride(hidden), whole = padded(rows, 16);
  Bfloat16* const attended = numbers(room);
  Bfloat16* const normed = numbers(room += floats(whole * ldi));
  Bfloat16* const gated = numbers(room += floats(whole * ldn));
  float* const sum = room + floats(whole * ldm);
  for (int64_t i = 0; i < rows; ++i) {
    __builtin_memcpy(attended + i * ldi, call.attended + call.places[first + i] * call.inner, call.inner * sizeof(Bfloat16));
    fill_up(attended + i * ldi, call.inner);
  }
  product(rows, call.inner, hidden, attended, ldi, call.packed_o,
          [=](int64_t i, int64_t j, Vec x) { store(sum + i * ldh + j, x); });
  for (int64_t i = 0; i < rows; ++i) {
    const Bfloat16* const h = call.h + call.places[first + i] * hidden;
    float* const to = sum + i * ldh;
    int64_t j = 0;
    for (; j + LANES <= hidden; j += LANES) store(to + j, load(to + j) + gets(h + j));
    for (; j < hidden; ++j) to[j] += get(h + j);
    rms_norm(to, call.norm, hidden, call.eps, normed + i * ldn);
    fill_up(normed + i * ldn, hidden);
  }
  alignas(64) float gates[kRows * kColumns], ups[kRows * kColumns];
  const int64_t deep = padded(hidden, kDeep);
  for (int64_t column = 0; column < call.mlp; column += kColumns)
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = least(kRows, rows - row);
      multiply(count <= 16, deep, normed + row * ldn, ldn, call.packed_gate + column * deep, gates);
      multiply(count <= 16, deep, normed + row * ldn, ldn, call.packed_up + column * deep, ups);
      for (int64_t i = 0; i < count * kColumns; i += LANES)
        puts(gated + (row + i / kColumns) * ldm + column + i % kColumns, silu(load(gates + i)) * load(ups + i));
    }
  product(rows, call.mlp, hidden, gated, ldm, call.packed_down,
          [=](int64_t i, int64_t j, Vec x) { puts(normed + i * ldn + j, x + load(sum + i * ldh + j)); });
  for (int64_t i = 0; i < rows; ++i)
    __builtin_memcpy(call.out + call.places[first + i] * hidden, normed + i * ldn, hidden * sizeof(Bfloat16));
}

// ---- a matrix alone ----------------------------------------------------------------------------------------------

int64_t dense_room(const Dense<Bfloat16>& call, int64_t rows) {
  return floats(padded(rows, 16) * row_stride(call.depth)) + floats(rows * row_stride(call.columns));
}

void dense(const Dense<Bfloat16>& call, int64_t first, int64_t rows, float* room) {
  const Tiles tiles;
  const int64_t depth = call.depth, columns = call.columns, lda = row_stride(depth), ldo = row_stride(columns);
  Bfloat16* const x = numbers(room);
  Bfloat16* const made = numbers(room + floats(padded(rows, 16) * lda));
  for (int64_t i = 0; i < rows; ++i) {
    __builtin_memcpy(x + i * lda, call.x + (first + i) * depth, depth * sizeof(Bfloat16));
    fill_up(x + i * lda, depth);
  }
  product(rows, depth, columns, x, lda, call.packed,
          [=](int64_t i, int64_t j, Vec sum) { puts(made + i * ldo + j, sum); });
  for (int64_t i = 0; i < rows; ++i)
    __builtin_memcpy(call.out + (first + i) * columns, made + i * ldo, columns * sizeof(Bfloat16));
}

// ---- logits ------------------------------------------------------------------------------------------------------

// Rows in the columns of a panel, as if they were a packed matrix [dim, rows].
void arrange_rows(const Bfloat16* from, int64_t rows, int64_t dim, Bfloat16* to) {
  for (int64_t k = 0; k < dim; k += kDeep)
    for (int64_t half = 0; half < 32; half += 16, to += kTile)
      turn_from(
          [=](int64_t i) {
            return half + i < rows ? numbers_at(from + (half + i) * dim + k) : _mm512_setzero_si512();
          },
          [=](int64_t i, __m512i x) { _mm512_storeu_si512(to + i * 32, x); });
}

void logits(const Logits<Bfloat16>& call, int64_t first, int64_t columns) {
  const Tiles tiles;
  const int64_t dim = call.dim, step = dim * sizeof(Bfloat16);
  alignas(64) float sums[kRows * kColumns];
  for (int64_t column = first; column < first + columns; column += 16) {
    const int64_t count = least(16, call.columns - column);
    const Bfloat16* const heads = call.heads + (count < 16 ? call.columns - 16 : column) * dim;
    for (int64_t row = 0; row < call.rows; row += kColumns) {
      const Bfloat16* pairs = call.arranged + row * dim;
      clear<0>(), clear<1>();
      for (int64_t k = 0; k < dim; k += kDeep, pairs += 2 * kTile) {
        read<4>(heads + k, step), read<6>(pairs, 64), read<7>(pairs + kTile, 64);
        add<0, 4, 6>(), add<1, 4, 7>();
      }
      write<0>(sums, kColumns * sizeof(float)), write<1>(sums + 16, kColumns * sizeof(float));
      for (int64_t half = 0; half < kColumns && row + half < call.rows; half += 16) {
        float* const to = call.out + (row + half) * call.columns + (count < 16 ? call.columns - 16 : column);
        const int64_t rows = least(16, call.rows - row - half);
        turn_from([&](int i) { return (__m512i)load(sums + i * kColumns + half); },
                  [=](int64_t i, __m512i x) {
                    if (i < rows) store(to + i * call.columns, (Vec)x);
                  });
      }
    }
  }
}

}  // namespace

const Kernels<Bfloat16> kAmx = {"amx", kColumns, kDeep, kRows, kPanel, kKeyBlock, pack, arrange, attention_room, attend,
                                beams_room, attend_beams, inputs_room, inputs, output_room, output,
                                dense_room, dense, arrange_rows, logits, nullptr, nullptr};

}  // namespace jgr
