// The machine: which backend it takes the place of, its devices, what it counts, how it fails.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define FAKE_CONCAT_(a, b) a##b
#define FAKE_CONCAT(a, b) FAKE_CONCAT_(a, b)
#if defined(FAKE_CUDA)
#define FAKE_KEY CUDA
#define FAKE_NAME "CUDA"
#define FAKE_HOOKS CUDAHooks
#define FAKE_HAS hasCUDA
#elif defined(FAKE_XPU)
#define FAKE_KEY XPU
#define FAKE_NAME "XPU"
#define FAKE_HOOKS XPUHooks
#define FAKE_HAS hasXPU
#elif defined(FAKE_MPS)
#define FAKE_KEY MPS
#define FAKE_NAME "MPS"
#define FAKE_HOOKS MPSHooks
#define FAKE_HAS hasMPS
#else
#define FAKE_KEY PrivateUse1
#define FAKE_NAME "fake accelerator"
#endif

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::FAKE_KEY;
constexpr c10::DispatchKey kKey = c10::DispatchKey::FAKE_KEY;
constexpr int kMaxDevices = 16;
constexpr int kPoison = 0xFF;  // NaN as a float, -1 as an integer

// Addresses

constexpr int kDeviceShift = 48;
constexpr uintptr_t kTag = uintptr_t(1) << 62;
constexpr uintptr_t kAddress = (uintptr_t(1) << kDeviceShift) - 1;

bool is_tagged(const void* p) { return uintptr_t(p) & kTag; }
int device_of(const void* p) { return int((uintptr_t(p) >> kDeviceShift) & 0xff) - 1; }
void* untag(const void* p) { return reinterpret_cast<void*>(uintptr_t(p) & kAddress); }
void* tag(void* p, int device) {
  return reinterpret_cast<void*>(uintptr_t(p) | (uintptr_t(device + 1) << kDeviceShift) | kTag);
}

// State

using StreamKey = std::pair<int, int64_t>;   // device, id
using Clock = std::map<StreamKey, int64_t>;  // per stream: the last task known to come before

// What is known of one allocation. A queued copy shares it, so that memory given back too early
// is poisoned, as a new owner would overwrite it, and never a use after free in this process.
struct Block {
  void* raw = nullptr;
  size_t bytes = 0;
  StreamKey home;                       // the stream that it was allocated on
  std::set<StreamKey> recorded;         // by record_stream
  std::pair<StreamKey, int64_t> write;  // the task that wrote last
  Clock reads;                          // the tasks that have read since
  std::multiset<StreamKey> queued;      // of each copy that has not happened yet: its stream

  void poison() const { memset(raw, kPoison, bytes); }
  ~Block() {
    poison();
    std::free(raw);
  }
};
using BlockPtr = std::shared_ptr<Block>;

struct Task {
  int64_t number;
  std::function<void()> run;
};
struct Stream {
  int64_t issued = 0;  // number of the newest task
  std::deque<Task> queue;
  Clock clock;
};

struct Device {
  size_t total = size_t(1) << 30;
  size_t others = 0;  // taken by "other processes"
  size_t used = 0;
  size_t peak = 0;
  bool context = false;
  at::Generator generator;
};

// The order of `COUNTERS` in driver.py.
enum Counter {
  H2D, D2H, D2D, P2P, NON_BLOCKING, FALLBACK, SYNC, ALLOCATIONS, OOMS, RACES, N_COUNTERS
};
enum FailPoint { AT_ALLOCATION, AT_COPY, N_FAIL_POINTS };

struct Machine {
  std::recursive_mutex mutex;
  int device_count = 2;
  bool async = false;
  Device devices[kMaxDevices];
  std::map<void*, BlockPtr> blocks;     // by tagged address
  std::vector<BlockPtr> freed;          // free, and not handed out again yet (only if async)
  std::map<uintptr_t, size_t> pinned;   // page-locked host memory: address, bytes
  std::map<StreamKey, Stream> streams;  // empty unless async
  Clock host;                           // what the host has waited for
  std::string last_race;
  std::set<std::string> blocked_ops;
  uint64_t blocked_dtypes = 0;          // a bit for each ScalarType
  int64_t fail_in[N_FAIL_POINTS] = {};  // 1: the next one fails; 0: none does
  int64_t fail_times[N_FAIL_POINTS] = {};
  std::atomic<int64_t> counters[N_COUNTERS]{};
};
// Leaked: tensors may outlive every static destructor.
Machine& machine() {
  static auto* m = new Machine;
  return *m;
}
using Lock = std::lock_guard<std::recursive_mutex>;
Lock lock() { return Lock(machine().mutex); }

thread_local int t_device = 0;
thread_local int64_t t_stream[kMaxDevices] = {};
thread_local bool t_in_kernel = false;  // copies are then part of a kernel, not transfers

void count(Counter c) { machine().counters[c]++; }

void check_index(int d) {
  TORCH_CHECK(d >= 0 && d < machine().device_count, FAKE_NAME, " error: invalid device ordinal (",
              d, " of ", machine().device_count, ")");
}

[[noreturn]] void out_of_memory(int d, size_t bytes) {
  const auto& device = machine().devices[d];
  count(OOMS);
  TORCH_CHECK_WITH(OutOfMemoryError, false, FAKE_NAME, " out of memory. Tried to allocate ", bytes,
                   " bytes. Device ", d, " has a total capacity of ", device.total,
                   " bytes, of which ", device.total - device.used - device.others, " are free.");
  __builtin_unreachable();
}

void fail_if_due(FailPoint point, int d, size_t bytes) {
  auto guard = lock();
  auto& m = machine();
  if (m.fail_in[point] == 0) return;
  if (m.fail_in[point] > 1) {
    m.fail_in[point]--;
    return;
  }
  if (--m.fail_times[point] <= 0) m.fail_in[point] = 0;
  out_of_memory(d, bytes);
}

}  // namespace
