// Memory of the devices, page-locked memory of the host, generators of random numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace {

void free_device_memory(void* p) {
  if (!p) return;
  auto guard = lock();
  auto& m = machine();
  auto it = m.blocks.find(p);
  if (it == m.blocks.end()) return;
  m.devices[device_of(p)].used -= it->second->bytes;
  if (m.async) m.freed.push_back(it->second);
  m.blocks.erase(it);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const int d = t_device;
    check_index(d);
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(d));
    if (n == 0) return {nullptr, nullptr, &free_device_memory, where};
    auto guard = lock();
    auto& m = machine();
    auto& device = m.devices[d];
    device.context = true;
    fail_if_due(AT_ALLOCATION, d, n);
    const size_t bytes = (n + 511) / 512 * 512;  // CUDA's granularity
    if (device.used + device.others + bytes > device.total) out_of_memory(d, n);

    auto block = std::make_shared<Block>();
    TORCH_CHECK(posix_memalign(&block->raw, 64, bytes) == 0, "the host has no memory left");
    block->bytes = bytes;
    block->home = current_stream(d);
    block->poison();
    if (m.async) {
      block->write = {block->home, issue(block->home)};
      reuse_freed(block->home);
    }
    void* address = tag(block->raw, d);
    m.blocks[address] = std::move(block);
    device.used += bytes;
    device.peak = std::max(device.peak, device.used);
    count(ALLOCATIONS);
    return {address, address, &free_device_memory, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* dst, const void* src, size_t n) const override {
    memcpy(untag(dst), untag(src), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    auto guard = lock();
    auto it = machine().blocks.find(p.get());
    if (it != machine().blocks.end()) it->second->recorded.insert({s.device_index(), s.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*stat)[0].current = static_cast<int64_t>(machine().devices[d].used);
      (*stat)[0].peak = static_cast<int64_t>(machine().devices[d].peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    machine().devices[d].peak = machine().devices[d].used;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    check_index(d);
    auto& device = machine().devices[d];
    device.context = true;  // cudaMemGetInfo makes one
    return {device.total - device.used - device.others, device.total};
  }
};
DeviceMemory g_device_memory;

bool is_pinned(const void* p) {
  auto guard = lock();
  const auto& pinned = machine().pinned;
  auto it = pinned.upper_bound(uintptr_t(p));
  if (it == pinned.begin()) return false;
  --it;
  return uintptr_t(p) < it->first + it->second;
}

void free_pinned_memory(void* p) {
  if (!p) return;
  auto guard = lock();
  machine().pinned.erase(uintptr_t(p));
  std::free(p);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device where(c10::kCPU);
    if (n == 0) return {nullptr, nullptr, &free_pinned_memory, where};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "the host has no memory left");
    auto guard = lock();
    machine().pinned[uintptr_t(p)] = n;
    return {p, p, &free_pinned_memory, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_memory; }
  void copy_data(void* dst, const void* src, size_t n) const override {
    default_copy_data(dst, src, n);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory g_pinned_memory;

// Random numbers

struct Generator final : at::CPUGeneratorImpl {  // the CPU's numbers under another device
  explicit Generator(c10::DeviceIndex d) {
    device_ = c10::Device(kType, d);
    key_set_ = c10::DispatchKeySet(kKey);
  }
  static c10::DeviceType device_type() { return kType; }
};

at::Generator& default_generator(int d) {
  if (d < 0) d = t_device;
  check_index(d);
  auto guard = lock();
  auto& generator = machine().devices[d].generator;
  if (!generator.defined()) generator = at::make_generator<Generator>(d);
  return generator;
}

}  // namespace
