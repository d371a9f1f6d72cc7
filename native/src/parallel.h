// SPDX-License-Identifier: Apache-2.0
// A loop over XLA's own threads. The caller works too and waits for nothing but items that others have begun, so a pool
// whose threads are all busy, or all wait in such loops themselves, cannot block it.

#ifndef JGR_NATIVE_PARALLEL_H_
#define JGR_NATIVE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jgr {

// body(item) for every item below count; it must not throw. Whoever helps too late finds no item left.
template <class Body>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, Body body) {
  struct State {
    State(int64_t count, Body body) : count(count), body(std::move(body)) {}
    const int64_t count;
    Body body;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void work() {
      int64_t mine = 0;
      for (int64_t item; (item = next.fetch_add(1)) < count; ++mine) body(item);
      if (mine > 0 && done.fetch_add(mine) + mine == count) {
        const std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  };
  if (count <= 0) return;
  const auto state = std::make_shared<State>(count, std::move(body));
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->work(); });
  state->work();
  for (int spin = 0; spin < 2000; ++spin)
    if (state->done.load() == count) return;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == count; });
}

// Working memory of this thread, 64-byte aligned; it stays for the next call.
inline float* room(int64_t floats) {
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<float[], Free> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset();
    memory.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
    size = floats;
  }
  return memory.get();
}

}  // namespace jgr

#endif  // JGR_NATIVE_PARALLEL_H_
