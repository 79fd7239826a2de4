// What torch asks of a backend: the current device, streams, events, and the hooks of its type.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace {

struct Event {
  StreamKey stream;
  int64_t number = 0;
  Clock clock;
  double milliseconds = 0;

  bool pending() const {
    auto guard = lock();
    auto it = machine().streams.find(stream);
    if (it == machine().streams.end() || it->second.queue.empty()) return false;
    return it->second.queue.front().number <= number;
  }
};

double milliseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

StreamKey key_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(t_device)};
  }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    check_index(d.index());
    t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(machine().device_count);
  }

  c10::Device with_index(c10::Device d) const { return d.index() < 0 ? getDevice() : d; }
  c10::Stream stream(c10::Device d, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, with_index(d), id);
  }
  c10::Stream getStream(c10::Device d) const override {
    return stream(d, t_stream[with_index(d).index()]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    static std::atomic<int64_t> next{1};
    return stream(d, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    t_stream[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream& s) const override {
    auto guard = lock();
    auto it = machine().streams.find(key_of(s));
    return it == machine().streams.end() || it->second.queue.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    count(SYNC);
    wait_for(key_of(s));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    count(SYNC);
    wait_for_device(d < 0 ? t_device : d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    g_device_memory.recordStream(p, s);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto guard = lock();
    if (!*event) *event = new Event;
    auto& e = *static_cast<Event*>(*event);
    e = {key_of(s), 0, {}, milliseconds_now()};
    if (!machine().async) return;
    e.number = issue(e.stream);
    e.clock = machine().streams[e.stream].clock;
  }
  // The waiting stream takes the wait into its queue. Nothing has happened yet: a host that takes
  // this for a synchronisation still reads poison.
  void block(void* event, const c10::Stream& s) const override {
    auto guard = lock();
    if (!event || !machine().async) return;
    const auto& e = *static_cast<Event*>(event);
    const auto number = issue(key_of(s));
    auto& waiting = machine().streams[key_of(s)];
    merge(waiting.clock, e.clock);
    if (e.pending() && e.stream != key_of(s))
      waiting.queue.push_back({number, [on = e.stream, to = e.number] { drain(on, to); }});
  }
  bool queryEvent(void* event) const override {
    return !event || !static_cast<Event*>(event)->pending();
  }
  void synchronizeEvent(void* event) const override {
    auto guard = lock();
    if (!event) return;
    count(SYNC);
    const auto& e = *static_cast<Event*>(event);
    drain(e.stream, e.number);
    merge(machine().host, e.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return static_cast<Event*>(to)->milliseconds - static_cast<Event*>(from)->milliseconds;
  }
};

// Hooks

#ifdef FAKE_HOOKS
using HooksInterface = at::FAKE_CONCAT(FAKE_HOOKS, Interface);
#else
using HooksInterface = at::PrivateUse1HooksInterface;
#endif

void resize_storage(c10::StorageImpl* s, size_t n);

struct Hooks : HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return machine().device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex d) const override {
    return machine().devices[d < 0 ? t_device : d].context;
  }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({kType, d}); }
  c10::DeviceIndex getCurrentDevice() const override { return Guard().getDevice().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice({kType, d}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
  c10::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(is_tagged(p), "not an address of device memory");
    return {kType, static_cast<c10::DeviceIndex>(device_of(p))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d = -1) const override {
    return default_generator(d);
  }
  at::Generator getNewGenerator(c10::DeviceIndex d = -1) const override {
    return at::make_generator<Generator>(d < 0 ? getCurrentDevice() : d);
  }
#ifdef FAKE_HOOKS
  bool FAKE_HAS() const override { return true; }
#endif
#if defined(FAKE_CUDA)
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  int getNumGPUs() const override { return machine().device_count; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &g_device_memory; }
  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }
#elif defined(FAKE_XPU)
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getNumGPUs() const override { return deviceCount(); }
  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }
#elif defined(FAKE_MPS)
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
  c10::Allocator* getMPSDeviceAllocator() const override { return &g_device_memory; }
  void deviceSynchronize() const override { Guard().synchronizeDevice(0); }
#else
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s.unsafeGetStorageImpl(), n);
  }
#endif
};

}  // namespace
