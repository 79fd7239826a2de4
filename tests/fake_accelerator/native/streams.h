// Streams: tasks that wait in queues, and a detector of races between them.
#pragma once

#include "machine.h"

namespace {

StreamKey current_stream(int d) { return {d, t_stream[d]}; }

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, number] : from) into[stream] = std::max(into[stream], number);
}

bool ordered(const StreamKey& stream, int64_t number, const Clock& before) {
  auto it = before.find(stream);
  return number == 0 || (it != before.end() && it->second >= number);
}

// A new task on this stream; it comes after all that the host has waited for.
int64_t issue(const StreamKey& key) {
  auto& stream = machine().streams[key];
  merge(stream.clock, machine().host);
  return stream.clock[key] = ++stream.issued;
}

// Let the stream work until the task with that number is done.
void drain(const StreamKey& key, int64_t number = INT64_MAX) {
  auto guard = lock();
  auto it = machine().streams.find(key);
  if (it == machine().streams.end()) return;
  auto& queue = it->second.queue;
  while (!queue.empty() && queue.front().number <= number) {
    auto task = std::move(queue.front());
    queue.pop_front();
    task.run();
  }
}

// The host waits for a stream: what it issues from now on, anywhere, comes after.
void wait_for(const StreamKey& key) {
  auto guard = lock();
  drain(key);
  auto it = machine().streams.find(key);
  if (it != machine().streams.end()) merge(machine().host, it->second.clock);
}

void wait_for_device(int d) {
  auto guard = lock();
  for (const auto& entry : machine().streams)
    if (entry.first.first == d) wait_for(entry.first);
}

void report_race(const StreamKey& by, const char* what, const StreamKey& other) {
  count(RACES);
  machine().last_race = c10::str("stream ", by.second, " of device ", by.first, " ", what,
                                 " stream ", other.second, " of device ", other.first,
                                 " without waiting for it");
}

BlockPtr block_of(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.device().type() != kType) return nullptr;
  auto it = machine().blocks.find(const_cast<void*>(t.storage().data()));
  return it == machine().blocks.end() ? nullptr : it->second;
}

// A race detector on vector clocks: the newest task of stream `by` uses the memory of `t`. Kernels
// have run by the time that another stream comes too early, so values alone cannot show all races.
void touch(const at::Tensor& t, const StreamKey& by, bool writes) {
  auto guard = lock();
  auto block = machine().async ? block_of(t) : nullptr;
  if (!block) return;
  auto& stream = machine().streams[by];
  const auto& [writer, number] = block->write;
  if (!ordered(writer, number, stream.clock)) report_race(by, "used memory written by", writer);
  if (!writes) {
    block->reads[by] = stream.issued;
    return;
  }
  for (const auto& [reader, last] : block->reads)
    if (!ordered(reader, last, stream.clock)) report_race(by, "overwrote memory read by", reader);
  block->reads.clear();
  block->write = {by, stream.issued};
}

// Memory given back is handed out again to its home stream at once. That is too early where
// another stream may still use it and neither record_stream nor a wait says so.
void reuse_freed(const StreamKey& home) {
  auto& m = machine();
  const auto& clock = m.streams[home].clock;
  std::vector<BlockPtr> kept;
  for (auto& block : m.freed) {
    if (block->home != home) {
      kept.push_back(std::move(block));
      continue;
    }
    auto uses = block->reads;
    auto& last = uses[block->write.first];
    last = std::max(last, block->write.second);
    for (const auto& [user, number] : uses) {
      if (block->recorded.count(user) || ordered(user, number, clock)) continue;
      report_race(home, "reused memory in use by", user);
      block->poison();
    }
  }
  m.freed = std::move(kept);
}

void set_async(bool on) {
  auto guard = lock();
  auto& m = machine();
  for (const auto& entry : m.streams) drain(entry.first);
  m.async = on;
  m.streams.clear();
  m.freed.clear();
  m.host.clear();
  m.last_race.clear();
  for (auto& [address, block] : m.blocks) {  // tasks are numbered from 1 again
    block->write = {};
    block->reads.clear();
    block->recorded.clear();
    block->queued.clear();
  }
}

}  // namespace
