// SPDX-License-Identifier: Apache-2.0
// The calls that XLA makes. Each checks every shape against the others before a kernel runs; what does not fit is an
// error of the program, never a read or write elsewhere.

#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ffi = xla::ffi;

namespace jgr {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Weights = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
template <class Type>
constexpr ffi::DataType kNumbers = std::is_same_v<Type, Bfloat16> ? ffi::BF16 : ffi::F32;
template <class Type>
using Array = ffi::Buffer<kNumbers<Type>>;
template <class Type>
using Made = ffi::ResultBuffer<kNumbers<Type>>;
using Shape = std::vector<int64_t>;

// The tables for floats that this processor can run, the best one first.
const std::vector<const Kernels<float>*>& runnable() {
  static const std::vector<const Kernels<float>*> found = [] {
    std::vector<const Kernels<float>*> there;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      there.push_back(&kAvx512);
    if (avx2) there.push_back(&kAvx2);
#endif
    there.push_back(&kGeneric);
    return there;
  }();
  return found;
}

// Whether this process may use AMX for bfloat16. Linux wants to be asked, since the tiles of a thread take 8 KB to save.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  unsigned a, b, c, d;
  if (runnable().front() != &kAvx512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile))
    return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kAvx512Bf16) == 0) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

std::atomic<const Kernels<float>*> chosen{nullptr};

// The table in use, null where there is none. A call asks once and keeps it, since packed weights are of one table.
template <class Type>
const Kernels<Type>* best();

template <>
const Kernels<float>* best() {
  const Kernels<float>* const found = chosen.load();
  return found != nullptr ? found : runnable().front();
}

template <>
const Kernels<Bfloat16>* best() {
#if defined(__x86_64__) && defined(__linux__)
  static const Kernels<Bfloat16>* const found = has_amx() ? &kAmx : nullptr;
  return found;
#else
  return nullptr;
#endif
}

std::string text(const Shape& shape) {
  std::string made = "[";
  for (size_t i = 0; i < shape.size(); ++i) made += (i ? ", " : "") + std::to_string(shape[i]);
  return made + "]";
}

// Collects the first shape that is not what it must be.
class Check {
 public:
  template <class Buffer>
  Check& is(const char* name, Buffer&& buffer, const Shape& wanted) {
    const auto dims = buffer.dimensions();
    const Shape found(dims.begin(), dims.end());
    if (problem_.empty() && found != wanted)
      problem_ = std::string(name) + " is " + text(found) + ", and must be " + text(wanted);
    return *this;
  }
  Check& that(bool holds, const char* problem) {
    if (problem_.empty() && !holds) problem_ = problem;
    return *this;
  }
  bool failed() const { return !problem_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument("jgr_native: " + problem_); }

 private:
  std::string problem_;
};

constexpr char kNoKernels[] = "this processor has no kernels for this type";

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// ---- attention -------------------------------------------------------------------------------------------------

template <class Type>
std::vector<Bounds> bounds_of_keys(const Attention<Type>& call, int64_t size) {
  constexpr int32_t most = 0x7fffffff;
  std::vector<Bounds> made;
  for (int64_t row = 0; row < call.batch; ++row)
    for (int64_t first = 0; first < call.keys; first += size) {
      Bounds bounds{{most, -most}, {most, -most}, {most, -most}, 0, -1, 0, -1, {0, 0}, false, true};
      for (int64_t i = row * call.keys + first, end = row * call.keys + std::min(first + size, call.keys); i < end; ++i) {
        if (call.k_request[i] < 0) {
          bounds.all_real = false;
          continue;
        }
        bounds.real = true;
        const auto widen = [](int32_t(&range)[2], int32_t x) {
          range[0] = std::min(range[0], x);
          range[1] = std::max(range[1], x);
        };
        widen(bounds.request, call.k_request[i]);
        widen(bounds.segment, call.k_segment[i]);
        widen(bounds.order, call.k_order[i]);
        bounds.any |= call.k_kind[i];
        bounds.common &= call.k_kind[i];
      }
      made.push_back(bounds);
    }
  return made;
}

// Arranges the values v [heads, keys, dim]: requests(head) are those of its keys, or null, and there(head) says how many
// there are.
template <class Type, class Requests, class There>
void arrange(ffi::ThreadPool& pool, const Kernels<Type>& kernels, const Type* v, int64_t heads, int64_t keys, int64_t dim,
             Requests requests, There there, Type* arranged) {
  const int64_t size = kernels.key_block, blocks = parts(keys, size);
  parallel(pool, heads * blocks, [=, &kernels](int64_t item) {
    const int64_t head = item / blocks, first = item % blocks * size, count = std::min(size, there(head) - first);
    if (count <= 0) return;
    const int32_t* const request = requests(head);
    kernels.arrange(v + (head * keys + first) * dim, request == nullptr ? nullptr : request + first, count, dim,
                    arranged + item * size * dim);
  });
}

// What a kernel wants of an attention besides its shapes, for values [heads, keys, dim].
template <class Type>
void check_room(Check& check, const Kernels<Type>& kernels, int64_t heads, int64_t keys, int64_t dim, int64_t arranged) {
  if (kernels.arrange == nullptr) return;
  check.that(dim % 32 == 0, "the size of a head must be a multiple of 32")
      .that(arranged >= heads * parts(keys, kernels.key_block) * kernels.key_block * dim, "arranged is too small");
}

// What all calls over segments take: queries [6, B, T]: request, segment, order, sees, earlier, lowest; described
// [4, B, S]: of keys, the kind last.
template <class Type>
Attention<Type> over_segments(Check& check, Array<Type>& q, Array<Type>& k, Ints& queries, Ints& described) {
  Attention<Type> call{};
  check.that(best<Type>() != nullptr, kNoKernels);
  check.that(q.dimensions().size() == 4 && k.dimensions().size() == 4, "q and k must have four dimensions");
  if (check.failed()) return call;
  call.batch = q.dimensions()[0], call.queries = q.dimensions()[1], call.heads = q.dimensions()[2];
  call.dim = q.dimensions()[3], call.kv_heads = k.dimensions()[1], call.keys = k.dimensions()[2];
  check.is("k", k, {call.batch, call.kv_heads, call.keys, call.dim})
      .is("queries", queries, {6, call.batch, call.queries})
      .is("keys", described, {4, call.batch, call.keys})
      .that(call.kv_heads > 0 && call.heads % call.kv_heads == 0, "heads must be a multiple of kv_heads");
  call.q = q.typed_data(), call.k = k.typed_data();
  const int32_t* at = queries.typed_data();
  const int64_t tokens = call.batch * call.queries, keys = call.batch * call.keys;
  call.q_request = at, call.q_segment = at + tokens, call.q_order = at + 2 * tokens;
  call.q_sees = at + 3 * tokens, call.q_earlier = at + 4 * tokens, call.q_lowest = at + 5 * tokens;
  at = described.typed_data();
  call.k_request = at, call.k_segment = at + keys, call.k_order = at + 2 * keys, call.k_kind = at + 3 * keys;
  return call;
}

// See over_segments. arranged: working memory.
template <class Type>
ffi::Error attention(ffi::ThreadPool pool, Array<Type> q, Array<Type> k, Array<Type> v, Ints queries, Ints described,
                     Made<Type> out, Made<Type> arranged) {
  Check check;
  Attention<Type> call = over_segments<Type>(check, q, k, queries, described);
  if (check.failed()) return check.error();
  const Kernels<Type>& kernels = *best<Type>();
  check.is("v", v, {call.batch, call.kv_heads, call.keys, call.dim})
      .is("out", *out, {call.batch, call.queries, call.heads, call.dim});
  check_room(check, kernels, call.batch * call.kv_heads, call.keys, call.dim, arranged->element_count());
  if (check.failed()) return check.error();
  call.v = v.typed_data(), call.out = out->typed_data();
  call.arranged = arranged->typed_data();

  if (kernels.arrange != nullptr)
    arrange(
        pool, kernels, call.v, call.batch * call.kv_heads, call.keys, call.dim,
        [call](int64_t head) { return call.k_request + head / call.kv_heads * call.keys; },
        [call](int64_t) { return call.keys; }, arranged->typed_data());
  const std::vector<Bounds> bounds = bounds_of_keys(call, kernels.key_block);
  call.key_bounds = bounds.data();
  const int64_t blocks = parts(call.queries * (call.heads / call.kv_heads), kernels.lanes);
  const int64_t heads = call.batch * call.kv_heads;
  // The last blocks of a prompt see most; those first, so that the threads end together.
  parallel(pool, heads * blocks, [call, blocks, &kernels](int64_t item) {
    const int64_t head = item % (call.batch * call.kv_heads), block = blocks - 1 - item / (call.batch * call.kv_heads);
    kernels.attend(call, head / call.kv_heads, head % call.kv_heads, block, room(kernels.attention_room(call)));
  });
  return ffi::Error::Success();
}

constexpr int64_t kSums = 32;  // as many sums of what keys get, so that the order of adding does not depend on threads

// See over_segments, of which the keys are the queries' own. out [B, T]: what each token gets from a query that sees it.
template <class Type>
ffi::Error attention_mass(ffi::ThreadPool pool, Array<Type> q, Array<Type> k, Ints queries, Ints described,
                          ffi::ResultBuffer<ffi::F32> out) {
  Check check;
  Attention<Type> call = over_segments<Type>(check, q, k, queries, described);
  if (check.failed()) return check.error();
  const Kernels<Type>& kernels = *best<Type>();
  check.that(kernels.give != nullptr, kNoKernels)
      .that(call.keys == call.queries, "the keys must be the queries' own")
      .is("out", *out, {call.batch, call.queries});
  if (check.failed()) return check.error();

  const std::vector<Bounds> bounds = bounds_of_keys(call, kernels.key_block);
  call.key_bounds = bounds.data();
  const int64_t group = call.heads / call.kv_heads, tokens = call.batch * call.keys;
  const int64_t blocks = parts(call.queries * group, kernels.lanes), items = call.batch * call.kv_heads * blocks;
  const int64_t sums = std::min(items, kSums);
  std::vector<float> mass(sums * tokens);
  std::vector<int32_t> seers(sums * tokens);
  parallel(pool, sums, [=, &kernels, &mass, &seers](int64_t mine) {
    for (int64_t item = mine; item < items; item += sums) {
      const int64_t head = item / blocks, row = head / call.kv_heads, at = mine * tokens + row * call.keys;
      kernels.give(call, row, head % call.kv_heads, item % blocks, room(kernels.mass_room(call)), &mass[at], &seers[at]);
    }
  });
  float* const to = out->typed_data();
  for (int64_t token = 0; token < tokens; ++token) {
    float got = 0;
    int64_t number = 0;  // each query once for every head of the group
    for (int64_t at = token; at < sums * tokens; at += tokens) got += mass[at], number += seers[at];
    to[token] = got / static_cast<float>(std::max<int64_t>(number / group, 1));
  }
  return ffi::Error::Success();
}

// q [B, W, H, d]; k, v [B, K, T, d], of which lengths [B] tokens are real; own_k, own_v [B, S, W, K, d]; ancestors
// [B, S, W]; widths [B], the beams of each request. arranged: as above.
template <class Type>
ffi::Error beam_attention(ffi::ThreadPool pool, Array<Type> q, Array<Type> k, Array<Type> v, Ints lengths,
                          Array<Type> own_k, Array<Type> own_v, Ints ancestors, Ints widths, Made<Type> out,
                          Made<Type> arranged) {
  Check check;
  const Kernels<Type>* const found = best<Type>();
  check.that(found != nullptr, kNoKernels);
  check.that(q.dimensions().size() == 4 && k.dimensions().size() == 4 && own_k.dimensions().size() == 5,
             "q and k must have four dimensions, own_k five");
  if (check.failed()) return check.error();
  const Kernels<Type>& kernels = *found;
  BeamAttention<Type> call{};
  call.batch = q.dimensions()[0], call.width = q.dimensions()[1], call.heads = q.dimensions()[2];
  call.dim = q.dimensions()[3], call.kv_heads = k.dimensions()[1], call.tokens = k.dimensions()[2];
  call.slots = own_k.dimensions()[1];
  const Shape own{call.batch, call.slots, call.width, call.kv_heads, call.dim};
  check.is("k", k, {call.batch, call.kv_heads, call.tokens, call.dim})
      .is("v", v, {call.batch, call.kv_heads, call.tokens, call.dim})
      .is("lengths", lengths, {call.batch})
      .is("own_k", own_k, own)
      .is("own_v", own_v, own)
      .is("ancestors", ancestors, {call.batch, call.slots, call.width})
      .is("widths", widths, {call.batch})
      .is("out", *out, {call.batch, call.width, call.heads, call.dim})
      .that(call.slots > 0, "there must be a slot")
      .that(call.kv_heads > 0 && call.heads % call.kv_heads == 0, "heads must be a multiple of kv_heads");
  check_room(check, kernels, call.batch * call.kv_heads, call.tokens, call.dim, arranged->element_count());
  if (check.failed()) return check.error();
  call.q = q.typed_data(), call.k = k.typed_data(), call.v = v.typed_data(), call.out = out->typed_data();
  call.arranged = arranged->typed_data();
  call.own_k = own_k.typed_data(), call.own_v = own_v.typed_data(), call.lengths = lengths.typed_data();
  call.ancestors = ancestors.typed_data(), call.widths = widths.typed_data();

  if (kernels.arrange != nullptr)
    arrange(
        pool, kernels, call.v, call.batch * call.kv_heads, call.tokens, call.dim,
        [](int64_t) -> const int32_t* { return nullptr; },
        [call](int64_t head) { return std::min<int64_t>(call.lengths[head / call.kv_heads], call.tokens); },
        arranged->typed_data());
  const int64_t blocks = parts(call.width * (call.heads / call.kv_heads), kernels.lanes);
  parallel(pool, call.batch * call.kv_heads * blocks, [call, blocks, &kernels](int64_t item) {
    const int64_t head = item / blocks;
    kernels.attend_beams(call, head / call.kv_heads, head % call.kv_heads, item % blocks, room(kernels.beams_room(call)));
  });
  return ffi::Error::Success();
}

// ---- matmuls ---------------------------------------------------------------------------------------------------

// A matrix [rows, columns], and where it is packed into panels.
template <class Type>
struct Matrix {
  Stored from;
  int64_t rows, columns;
  Type* to;
};

template <class Type>
int64_t packed_size(const Kernels<Type>& kernels, int64_t rows, int64_t columns) {
  return parts(columns, kernels.panel) * kernels.panel * parts(rows, kernels.depth) * kernels.depth;
}

template <class Type>
void pack(ffi::ThreadPool& pool, const Kernels<Type>& kernels, const std::vector<Matrix<Type>>& matrices) {
  struct Item {
    const Matrix<Type>* matrix;
    int64_t panel;
  };
  std::vector<Item> items;
  for (const Matrix<Type>& matrix : matrices)
    for (int64_t panel = 0; panel < parts(matrix.columns, kernels.panel); ++panel) items.push_back({&matrix, panel});
  parallel(pool, static_cast<int64_t>(items.size()), [&items, &kernels](int64_t i) {
    const auto& [matrix, panel] = items[i];
    kernels.pack(matrix->from, matrix->rows, matrix->columns, panel, matrix->to);
  });
}

constexpr int64_t kRows = 96;  // about as many rows as a core's cache holds with a layer's activations

// run(first, rows) for ranges of all rows, as many for each thread and each a multiple of `tile`.
template <class Run>
void over_rows(ffi::ThreadPool& pool, int64_t rows, int64_t tile, Run run) {
  if (rows == 0) return;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t ranges = parts(parts(rows, kRows), threads) * threads;
  const int64_t size = parts(parts(rows, ranges), tile) * tile;
  parallel(pool, parts(rows, size), [=](int64_t i) { run(i * size, std::min(size, rows - i * size)); });
}

// The places of the tokens that are there, of real [B, T].
std::vector<int64_t> places_of(const Ints& real) {
  std::vector<int64_t> found;
  const int32_t* at = real.typed_data();
  for (int64_t i = 0, count = real.element_count(); i < count; ++i)
    if (at[i] != 0) found.push_back(i);
  return found;
}

// Zeros for the tokens that are not there: to [B, groups, T, size] or, with one group, [B, T, size].
template <class Type>
void clear_others(const Ints& real, Type* to, int64_t groups, int64_t size) {
  const int64_t batch = real.dimensions()[0], tokens = real.dimensions()[1];
  for (int64_t row = 0; row < batch; ++row)
    for (int64_t token = 0; token < tokens; ++token)
      if (real.typed_data()[row * tokens + token] == 0)
        for (int64_t group = 0; group < groups; ++group)
          std::fill_n(to + ((row * groups + group) * tokens + token) * size, size, Type{});
}

template <class Stack>
auto layer_of(const Stack& stack, int64_t layer) {
  return stack.typed_data() + layer * (stack.element_count() / stack.dimensions()[0]);
}

// A stack of matrices is [L, rows, columns]: of Type, or int8, or uint8 that are the bits of fp8, with scale [L, columns];
// or [L, packed size] of Type, which `pack` has made.
bool is_packed(const Weights& stack) { return stack.dimensions().size() == 2; }

template <class Type>
void check_matrix(Check& check, const Kernels<Type>& kernels, const char* name, const Weights& stack,
                  const Floats& scale, const Shape& shape) {
  const auto type = stack.element_type();
  const bool same = type == kNumbers<Type>, packed = is_packed(stack) && same && kernels.dense != nullptr;
  check.is(name, stack, packed ? Shape{shape[0], packed_size(kernels, shape[1], shape[2])} : shape)
      .that(same || type == ffi::S8 || type == ffi::U8, "matrices must be of the type of h, S8 or U8")
      .is("the scale of a matrix", scale, {shape[0], same ? 0 : shape[2]});
}

// The packed matrices of one layer: those that are packed already where they stand, the others in working memory.
template <class Type>
class Matrices {
 public:
  Matrices(const Kernels<Type>& kernels, Made<Type>& room, int64_t layer)
      : kernels_(kernels), memory_(room->typed_data()), left_(room->element_count()), layer_(layer) {}

  const Type* take(const Weights& stack, const Floats& scale, int64_t rows, int64_t columns) {
    const int64_t size = packed_size(kernels_, rows, columns);
    const auto type = stack.element_type();
    const bool same = type == kNumbers<Type>;
    const char* const numbers = static_cast<const char*>(stack.untyped_data()) +
                                layer_ * (is_packed(stack) ? size : rows * columns) * (same ? sizeof(Type) : 1);
    if (is_packed(stack)) return reinterpret_cast<const Type*>(numbers);
    const Number number = same ? Number::kSame : type == ffi::S8 ? Number::kInt8 : Number::kFp8;
    Type* const to = memory_;
    memory_ += size, left_ -= size;
    wanted_.push_back({{numbers, number, same ? nullptr : layer_of(scale, layer_)}, rows, columns, to});
    return to;
  }
  bool fit() const { return left_ >= 0; }
  void pack_all(ffi::ThreadPool& pool) { pack<Type>(pool, kernels_, wanted_); }

 private:
  const Kernels<Type>& kernels_;
  Type* memory_;
  int64_t left_, layer_;
  std::vector<Matrix<Type>> wanted_;
};

template <class Stack>
auto if_there(const Stack& stack, int64_t layer) {
  return stack.dimensions()[1] == 0 ? nullptr : layer_of(stack, layer);
}

// h [B, T, D]; real [B, T]: 0 for padding, which is not computed. Weights are stacks [L, ...], of which the one of
// `number` is meant; biases and the norms of heads have a size of 0 where there are none. queries = false: q [B, T, 0, d]
// is not computed. packed: working memory.
template <class Type>
ffi::Error inputs(ffi::ThreadPool pool, Array<Type> h, Ints real, Ints number, Floats cos, Floats sin, Array<Type> norm,
                  Weights wq, Weights wk, Weights wv, Floats q_scale, Floats k_scale, Floats v_scale, Array<Type> bq,
                  Array<Type> bk, Array<Type> bv, Array<Type> q_norm, Array<Type> k_norm, Made<Type> q, Made<Type> k,
                  Made<Type> v, Made<Type> packed, float eps) {
  const Kernels<Type>* const found = best<Type>();
  Check check;
  check.that(h.dimensions().size() == 3 && q->dimensions().size() == 4 && k->dimensions().size() == 4 &&
                 norm.dimensions().size() == 2 && number.element_count() == 1,
             "h, q, k, norm or number has another number of dimensions")
      .that(found != nullptr, kNoKernels);
  for (const Array<Type>* each : {&bq, &bk, &bv, &q_norm, &k_norm})
    check.that(each->dimensions().size() == 2, "biases and norms must have two dimensions");
  if (check.failed()) return check.error();
  const int64_t batch = h.dimensions()[0], tokens = h.dimensions()[1], hidden = h.dimensions()[2];
  const int64_t heads = q->dimensions()[2], kv_heads = k->dimensions()[1], dim = k->dimensions()[3];
  const int64_t layers = norm.dimensions()[0], layer = number.typed_data()[0];
  const auto optional = [&](const char* name, const Array<Type>& x, int64_t size) {
    check.is(name, x, {layers, x.dimensions()[1] == 0 ? 0 : size});
  };
  check_matrix<Type>(check, *found, "wq", wq, q_scale, {layers, hidden, heads * dim});
  check_matrix<Type>(check, *found, "wk", wk, k_scale, {layers, hidden, kv_heads * dim});
  check_matrix<Type>(check, *found, "wv", wv, v_scale, {layers, hidden, kv_heads * dim});
  check.is("norm", norm, {layers, hidden})
      .is("real", real, {batch, tokens})
      .is("cos", cos, {batch, tokens, 1, dim / 2})
      .is("sin", sin, {batch, tokens, 1, dim / 2})
      .is("q", *q, {batch, tokens, heads, dim})
      .is("k", *k, {batch, kv_heads, tokens, dim})
      .is("v", *v, {batch, kv_heads, tokens, dim})
      .that(layer >= 0 && layer < layers, "number must be that of a layer")
      .that(dim > 0 && dim % 2 == 0, "the size of a head must be even")
      .that(found->arrange == nullptr || dim % 32 == 0, "the size of a head must be a multiple of 32");
  optional("bq", bq, heads * dim), optional("bk", bk, kv_heads * dim), optional("bv", bv, kv_heads * dim);
  optional("q_norm", q_norm, dim), optional("k_norm", k_norm, dim);
  if (check.failed()) return check.error();

  const Kernels<Type>& kernels = *found;
  Matrices<Type> matrices(kernels, packed, layer);
  const Type* const of_q = matrices.take(wq, q_scale, hidden, heads * dim);
  const Type* const of_k = matrices.take(wk, k_scale, hidden, kv_heads * dim);
  const Type* const of_v = matrices.take(wv, v_scale, hidden, kv_heads * dim);
  check.that(matrices.fit(), "packed is too small");
  if (check.failed()) return check.error();
  matrices.pack_all(pool);

  Inputs<Type> call{};
  call.h = h.typed_data(), call.norm = layer_of(norm, layer), call.cos = cos.typed_data(), call.sin = sin.typed_data();
  call.packed_q = of_q, call.packed_k = of_k, call.packed_v = of_v;
  call.bias_q = if_there(bq, layer), call.bias_k = if_there(bk, layer), call.bias_v = if_there(bv, layer);
  call.norm_q = if_there(q_norm, layer), call.norm_k = if_there(k_norm, layer);
  call.q = heads > 0 ? q->typed_data() : nullptr, call.k = k->typed_data(), call.v = v->typed_data();
  call.tokens = tokens, call.hidden = hidden, call.heads = heads, call.kv_heads = kv_heads, call.dim = dim;
  call.eps = eps;
  const std::vector<int64_t> places = places_of(real);
  call.places = places.data();
  if (heads > 0) clear_others(real, call.q, 1, heads * dim);
  clear_others(real, call.k, kv_heads, dim), clear_others(real, call.v, kv_heads, dim);
  over_rows(pool, static_cast<int64_t>(places.size()), kernels.row_tile, [call, &kernels](int64_t first, int64_t rows) {
    kernels.inputs(call, first, rows, room(kernels.inputs_room(call, rows)));
  });
  return ffi::Error::Success();
}

// h [B, T, D], attended [B, T, H * d], real as above; weights are stacks [L, ...]. packed: working memory.
template <class Type>
ffi::Error output(ffi::ThreadPool pool, Array<Type> h, Array<Type> attended, Ints real, Ints number, Weights wo,
                  Array<Type> norm, Weights gate, Weights up, Weights down, Floats o_scale, Floats gate_scale,
                  Floats up_scale, Floats down_scale, Made<Type> out, Made<Type> packed, float eps, int64_t mlp) {
  const Kernels<Type>* const found = best<Type>();
  Check check;
  check.that(h.dimensions().size() == 3 && attended.dimensions().size() == 3 && norm.dimensions().size() == 2 &&
                 number.element_count() == 1 && mlp > 0,
             "h, attended, norm, number or mlp is not as it must be")
      .that(found != nullptr, kNoKernels);
  if (check.failed()) return check.error();
  const int64_t batch = h.dimensions()[0], tokens = h.dimensions()[1], hidden = h.dimensions()[2];
  const int64_t layers = norm.dimensions()[0], inner = attended.dimensions()[2];
  const int64_t layer = number.typed_data()[0];
  check_matrix<Type>(check, *found, "wo", wo, o_scale, {layers, inner, hidden});
  check_matrix<Type>(check, *found, "gate", gate, gate_scale, {layers, hidden, mlp});
  check_matrix<Type>(check, *found, "up", up, up_scale, {layers, hidden, mlp});
  check_matrix<Type>(check, *found, "down", down, down_scale, {layers, mlp, hidden});
  check.is("attended", attended, {batch, tokens, inner})
      .is("real", real, {batch, tokens})
      .is("norm", norm, {layers, hidden})
      .is("out", *out, {batch, tokens, hidden})
      .that(layer >= 0 && layer < layers, "number must be that of a layer");
  if (check.failed()) return check.error();

  const Kernels<Type>& kernels = *found;
  Matrices<Type> matrices(kernels, packed, layer);
  const Type* const of_o = matrices.take(wo, o_scale, inner, hidden);
  const Type* const of_gate = matrices.take(gate, gate_scale, hidden, mlp);
  const Type* const of_up = matrices.take(up, up_scale, hidden, mlp);
  const Type* const of_down = matrices.take(down, down_scale, mlp, hidden);
  check.that(matrices.fit(), "packed is too small");
  if (check.failed()) return check.error();
  matrices.pack_all(pool);

  Output<Type> call{};
  call.h = h.typed_data(), call.attended = attended.typed_data(), call.norm = layer_of(norm, layer);
  call.packed_o = of_o, call.packed_gate = of_gate, call.packed_up = of_up, call.packed_down = of_down;
  call.out = out->typed_data(), call.inner = inner, call.hidden = hidden, call.mlp = mlp, call.eps = eps;
  const std::vector<int64_t> places = places_of(real);
  call.places = places.data();
  clear_others(real, call.out, 1, hidden);
  over_rows(pool, static_cast<int64_t>(places.size()), kernels.row_tile, [call, &kernels](int64_t first, int64_t rows) {
    kernels.output(call, first, rows, room(kernels.output_room(call, rows)));
  });
  return ffi::Error::Success();
}

// ---- matrices alone ----------------------------------------------------------------------------------------------

// stack [L, rows, columns], packed [L, packed size].
template <class Type>
ffi::Error pack_stack(ffi::ThreadPool pool, Array<Type> stack, Made<Type> packed) {
  Check check;
  const Kernels<Type>* const found = best<Type>();
  check.that(stack.dimensions().size() == 3, "a stack must have three dimensions").that(found != nullptr, kNoKernels);
  if (check.failed()) return check.error();
  const int64_t layers = stack.dimensions()[0], rows = stack.dimensions()[1], columns = stack.dimensions()[2];
  const int64_t size = packed_size(*found, rows, columns);
  check.is("packed", *packed, {layers, size});
  if (check.failed()) return check.error();
  std::vector<Matrix<Type>> wanted;
  for (int64_t layer = 0; layer < layers; ++layer)
    wanted.push_back({{stack.typed_data() + layer * rows * columns, Number::kSame, nullptr}, rows, columns,
                      packed->typed_data() + layer * size});
  pack<Type>(pool, *found, wanted);
  return ffi::Error::Success();
}

// x [n, rows], packed [packed size], out [n, columns].
template <class Type>
ffi::Error dense(ffi::ThreadPool pool, Array<Type> x, Array<Type> packed, Made<Type> out) {
  Check check;
  const Kernels<Type>* const found = best<Type>();
  check.that(x.dimensions().size() == 2 && out->dimensions().size() == 2, "x and out must have two dimensions")
      .that(found != nullptr, kNoKernels);
  if (check.failed()) return check.error();
  const Kernels<Type>& kernels = *found;
  const int64_t rows = x.dimensions()[0];
  Dense<Type> call{};
  call.x = x.typed_data(), call.packed = packed.typed_data(), call.out = out->typed_data();
  call.depth = x.dimensions()[1], call.columns = out->dimensions()[1];
  check.is("packed", packed, {packed_size(kernels, call.depth, call.columns)}).is("out", *out, {rows, call.columns});
  if (check.failed()) return check.error();
  over_rows(pool, rows, kernels.row_tile, [call, &kernels](int64_t first, int64_t rows) {
    kernels.dense(call, first, rows, room(kernels.dense_room(call, rows)));
  });
  return ffi::Error::Success();
}

// ---- logits ------------------------------------------------------------------------------------------------------

// hidden [n, D], heads [V, D], out [n, V]. arranged: working memory.
template <class Type>
ffi::Error logits(ffi::ThreadPool pool, Array<Type> hidden, Array<Type> heads, Made<float> out, Made<Type> arranged) {
  Check check;
  const Kernels<Type>* const found = best<Type>();
  check.that(hidden.dimensions().size() == 2 && heads.dimensions().size() == 2, "hidden and heads must have two dimensions")
      .that(found != nullptr, kNoKernels);
  if (check.failed()) return check.error();
  const Kernels<Type>& kernels = *found;
  Logits<Type> call{};
  call.rows = hidden.dimensions()[0], call.dim = hidden.dimensions()[1], call.columns = heads.dimensions()[0];
  const int64_t panel = kernels.panel, blocks = parts(call.rows, panel);
  check.is("heads", heads, {call.columns, call.dim})
      .is("out", *out, {call.rows, call.columns})
      .that(call.dim % 32 == 0, "the size of hidden states must be a multiple of 32")
      .that(call.columns >= 16, "there must be 16 heads at least")
      .that(static_cast<int64_t>(arranged->element_count()) >= blocks * panel * call.dim, "arranged is too small");
  if (check.failed()) return check.error();
  const Type* const from = hidden.typed_data();
  Type* const to = arranged->typed_data();
  call.heads = heads.typed_data(), call.arranged = to, call.out = out->typed_data();
  parallel(pool, blocks, [=, &kernels](int64_t block) {
    const int64_t first = block * panel;
    kernels.arrange_rows(from + first * call.dim, std::min(panel, call.rows - first), call.dim, to + first * call.dim);
  });
  constexpr int64_t kAtOnce = 512;
  // The last item takes the rest too: its last tile begins 16 columns before the end, which no other item may write.
  const int64_t items = std::max<int64_t>(call.columns / kAtOnce, 1);
  parallel(pool, items, [=, &kernels](int64_t item) {
    const int64_t first = item * kAtOnce;
    kernels.logits(call, first, item == items - 1 ? call.columns - first : kAtOnce);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jgr

#define JGR_EXPORT extern "C" __attribute__((visibility("default")))

JGR_EXPORT const char* jgr_native_kernels();
JGR_EXPORT const char* jgr_native_bfloat16_kernels();
JGR_EXPORT int jgr_native_choose(const char* name);

// The name of the instruction set in use for floats.
const char* jgr_native_kernels() { return jgr::best<float>()->name; }

// The same for bfloat16; empty where there is none.
const char* jgr_native_bfloat16_kernels() {
  const jgr::Kernels<jgr::Bfloat16>* const found = jgr::best<jgr::Bfloat16>();
  return found == nullptr ? "" : found->name;
}

// For tests: use the instruction set of this name for floats; 0 where this processor has it not, and nothing is changed.
int jgr_native_choose(const char* name) {
  for (const auto* each : jgr::runnable())
    if (std::strcmp(each->name, name) == 0) {
      jgr::chosen = each;
      return 1;
    }
  return 0;
}

namespace jgr {
namespace {

template <class Type>
auto binding_of_attention() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Ints>()
      .template Arg<Ints>().template Ret<Array<Type>>().template Ret<Array<Type>>();
}

template <class Type>
auto binding_of_mass() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Ints>()
      .template Arg<Ints>().template Ret<Floats>();
}

template <class Type>
auto binding_of_beams() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Ints>()
      .template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Ints>().template Arg<Ints>().template Ret<Array<Type>>().template Ret<Array<Type>>();
}

template <class Type>
auto binding_of_inputs() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Ints>().template Arg<Ints>().template Arg<Floats>().template Arg<Floats>()
      .template Arg<Array<Type>>().template Arg<Weights>().template Arg<Weights>().template Arg<Weights>().template Arg<Floats>().template Arg<Floats>().template Arg<Floats>()
      .template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Array<Type>>()
      .template Ret<Array<Type>>().template Ret<Array<Type>>().template Ret<Array<Type>>().template Ret<Array<Type>>().template Attr<float>("eps");
}

template <class Type>
auto binding_of_output() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>().template Arg<Ints>().template Arg<Ints>()
      .template Arg<Weights>().template Arg<Array<Type>>().template Arg<Weights>().template Arg<Weights>().template Arg<Weights>().template Arg<Floats>().template Arg<Floats>()
      .template Arg<Floats>().template Arg<Floats>().template Ret<Array<Type>>().template Ret<Array<Type>>().template Attr<float>("eps")
      .template Attr<int64_t>("mlp");
}

template <class Type>
auto binding_of_pack() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Ret<Array<Type>>();
}

template <class Type>
auto binding_of_dense() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>()
      .template Ret<Array<Type>>();
}

template <class Type>
auto binding_of_logits() {
  return ffi::Ffi::Bind().template Ctx<ffi::ThreadPool>().template Arg<Array<Type>>().template Arg<Array<Type>>()
      .template Ret<Floats>().template Ret<Array<Type>>();
}

}  // namespace
}  // namespace jgr

#define JGR_CALL(name, binding, call, Type)                                    \
  JGR_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*);                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, jgr::call<Type>, jgr::binding<Type>())

JGR_CALL(jgr_native_attention_float32, binding_of_attention, attention, float);
JGR_CALL(jgr_native_attention_bfloat16, binding_of_attention, attention, jgr::Bfloat16);
JGR_CALL(jgr_native_attention_mass_float32, binding_of_mass, attention_mass, float);
JGR_CALL(jgr_native_beam_attention_float32, binding_of_beams, beam_attention, float);
JGR_CALL(jgr_native_beam_attention_bfloat16, binding_of_beams, beam_attention, jgr::Bfloat16);
JGR_CALL(jgr_native_inputs_float32, binding_of_inputs, inputs, float);
JGR_CALL(jgr_native_inputs_bfloat16, binding_of_inputs, inputs, jgr::Bfloat16);
JGR_CALL(jgr_native_output_float32, binding_of_output, output, float);
JGR_CALL(jgr_native_output_bfloat16, binding_of_output, output, jgr::Bfloat16);
JGR_CALL(jgr_native_token_logits_bfloat16, binding_of_logits, logits, jgr::Bfloat16);
JGR_CALL(jgr_native_pack_bfloat16, binding_of_pack, pack_stack, jgr::Bfloat16);
JGR_CALL(jgr_native_dense_bfloat16, binding_of_dense, dense, jgr::Bfloat16);
