// Devices, streams, events and memory of a CUDA machine that is not there.
//
// One lock is around all of it, and the host is one timeline: what two of its threads do is taken to be in order.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "clocks.h"

namespace fake {

constexpr int MAX_DEVICES = 8;
constexpr size_t ARENA_BYTES = size_t(1) << 34;  // of addresses; memory is taken page by page
constexpr int POISON = 0xff;                     // NaN in every floating-point dtype

// When the work of side streams is done. Work of a default stream is done at once, but what the host sees of it is not.
enum class Order { late, early, random };

inline std::recursive_mutex& lock_of_all() {
  static std::recursive_mutex mutex;
  return mutex;
}
// While a thread has the lock none of its operators asks a mode of Python's: another thread may hold Python's lock, and wait for this one.
struct Locked {
  std::lock_guard<std::recursive_mutex> lock;
  c10::impl::ExcludeDispatchKeyGuard without_python{c10::python_ks};
  explicit Locked(std::recursive_mutex& mutex) : lock(mutex) {}
};

// A tensor's memory without the tensor, so that nothing is kept alive.
struct View {
  char* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  size_t num_bytes;  // from the first element to the end of the last

  explicit View(const at::Tensor& tensor)
      : data(nullptr), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), dtype(tensor.scalar_type()), num_bytes(0) {
    const void* base = tensor.storage().data();
    if (base != nullptr && tensor.numel() > 0) {
      data = const_cast<char*>(static_cast<const char*>(base)) + tensor.storage_offset() * tensor.element_size();
      int64_t last = 0;
      for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
      num_bytes = (last + 1) * tensor.element_size();
    }
  }
  uintptr_t low() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t high() const { return low() + num_bytes; }
  bool overlaps(const View& other) const { return low() < other.high() && other.low() < high(); }
  // As a tensor of the host's; only where the memory may be touched.
  at::Tensor tensor() const { return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU)); }
};

// ---- device memory: the host may not touch it but in here

struct Arena {
  char* start = nullptr;
  size_t used = 0;
  size_t capacity = size_t(80) << 30;
};

inline char* arenas() {
  static char* start = static_cast<char*>(mmap(
      nullptr, ARENA_BYTES * MAX_DEVICES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return start;
}

inline int device_of(const void* address) {  // -1: none's
  auto offset = static_cast<const char*>(address) - arenas();
  return offset < 0 || static_cast<size_t>(offset) >= ARENA_BYTES * MAX_DEVICES ? -1 : static_cast<int>(offset / ARENA_BYTES);
}

inline size_t whole_pages(size_t num_bytes) { return std::max<size_t>((num_bytes + 4095) & ~size_t(4095), 4096); }

// While one is there, kernels run: memory of the devices can be touched.
class Opened {
 public:
  Opened() {
    Locked locked(lock_of_all());
    if (count()++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  ~Opened() {
    Locked locked(lock_of_all());
    if (--count() == 0) protect(PROT_NONE);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  static void extend(int device, size_t used) {
    Locked locked(lock_of_all());
    used_bytes()[device] = used;
    if (count() > 0) mprotect(arenas() + device * ARENA_BYTES, whole_pages(used), PROT_READ | PROT_WRITE);
  }

 private:
  static int& count() {
    static int value = 0;
    return value;
  }
  static std::array<size_t, MAX_DEVICES>& used_bytes() {
    static std::array<size_t, MAX_DEVICES> value{};
    return value;
  }
  static void protect(int flags) {
    for (int device = 0; device < MAX_DEVICES; ++device) {
      if (used_bytes()[device] > 0) mprotect(arenas() + device * ARENA_BYTES, whole_pages(used_bytes()[device]), flags);
    }
  }
};

struct Counters {
  std::map<std::string, long> launches;    // by operator
  std::map<std::string, long> host_waits;  // by what the host waited for
  std::map<std::string, std::pair<long, long>> copies;  // number and bytes, by direction
};

struct Event {
  int stream = 0;
  uint64_t time = 0;
  Clock clock;
  int num_polls = 0;
};

class Machine {
 public:
  static Machine& get() {
    static auto* machine = new Machine;  // outlives whatever the end of the process frees
    return *machine;
  }

  // What a test may set.
  int num_devices = 1;
  Order order = Order::late;
  bool is_pageable_async = false;  // as on machines whose GPU reads the host's page tables
  bool finds_conflicts = true;     // false: another detector is to find them
  int sync_debug_mode = 0;         // of torch's names "default", "warn" and "error"
  int polls_until_done = 2;        // an event is found done by the query after these
  Counters counters;
  std::vector<std::string> conflicts;  // found so far
  std::mt19937 random;

  // ---- which devices this process has used: CUDA makes a context on each, which takes half a GiB there

  void touch(int device, const std::string& what) {
    if (is_touched_.at(device)) return;
    Locked locked(lock_of_all());
    if (is_touched_[device].exchange(true)) return;
    touched_[device] = what + (gettid() == getpid() ? "" : ", in a thread of its own");
  }
  bool is_touched(int device) const { return is_touched_.at(device); }
  std::map<int, std::string> touched() {  // and by what first
    Locked locked(lock_of_all());
    return touched_;
  }
  void forget_touched() {
    Locked locked(lock_of_all());
    for (auto& one : is_touched_) one = false;
    touched_.clear();
  }

  // ---- streams

  // Those of the first numbers are the default streams of the devices.
  int new_stream(int device) {
    touch(device, "a stream");
    Locked locked(lock_of_all());
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->device = device;
    return static_cast<int>(streams_.size()) - 1;
  }
  int num_streams() const { return static_cast<int>(streams_.size()); }
  int device_of_stream(int stream) { return streams_.at(stream)->device; }

  // Work that is issued now comes after all that the host knows to be done; returns its time on the stream.
  uint64_t issue(int stream, const std::string& what = "a copy or a wait") {
    Stream& one = *streams_.at(stream);
    touch(one.device, what);
    join(one.clock, host_);
    if (one.clock.size() <= static_cast<size_t>(stream)) one.clock.resize(stream + 1);
    one.clock[stream] = ++one.issued;
    return one.issued;
  }
  void note(int stream, const View& view, bool is_write, const std::string& what) {
    if (view.num_bytes == 0 || !finds_conflicts) return;
    Stream& one = *streams_.at(stream);
    auto found = history_.note(view.low(), view.high(), Access{stream, one.issued, is_write, what}, one.clock);
    if (found) report(*found);
  }
  // Run it now on a default stream, and when its time comes on another.
  void perform(int stream, std::function<void()> work) {
    Stream& one = *streams_.at(stream);
    if (is_default(stream)) {
      run_until(stream, one.issued);
      work();
      one.done = one.issued;
      return;
    }
    one.waiting.push_back({one.issued, std::move(work)});
    if (order == Order::early) run_until(stream, one.issued);
    if (order == Order::random) run_some();
  }
  // Kernels of side streams are not kept: what they wait for is done first, and then they are.
  void catch_up(int stream) { run_until(stream, streams_.at(stream)->issued); }

  Event record(int stream) {
    Locked locked(lock_of_all());
    Stream& one = *streams_.at(stream);
    touch(one.device, "an event, or a wait for a stream");
    join(one.clock, host_);
    return {stream, one.issued, one.clock, 0};
  }
  void block(const Event& event, int stream) {
    Locked locked(lock_of_all());
    if (event.stream == stream) return;
    join(streams_.at(stream)->clock, event.clock);
    issue(stream);
    perform(stream, [this, from = event.stream, time = event.time] { run_until(from, time); });
  }
  bool is_known_done(const Event& event) {
    Locked locked(lock_of_all());
    return event.time == 0 || time_of(host_, event.stream) >= event.time;
  }
  bool query(Event& event) {
    Locked locked(lock_of_all());
    if (!is_known_done(event)) {
      int due = order == Order::random ? static_cast<int>(random() % 4) : polls_until_done;
      if (order != Order::early && event.num_polls++ < due) return false;
      arrive(event);
    }
    return true;
  }
  void synchronize(const Event& event, const std::string& what) {
    Locked locked(lock_of_all());
    ++counters.host_waits[what];
    arrive(event);
  }
  void synchronize_device(int device) {
    touch(device, "a wait for all of a device");
    Locked locked(lock_of_all());
    ++counters.host_waits["device.synchronize"];
    for (int stream = 0; stream < num_streams(); ++stream) {
      if (streams_[stream]->device == device) arrive(record(stream));
    }
  }

  // ---- memory

  char* allocate(int device, size_t num_bytes, int stream) {
    touch(device, "memory");
    Locked locked(lock_of_all());
    free_those_used_up();
    size_t size = (num_bytes + 511) / 512 * 512;
    Arena& arena = arenas_[device];
    auto& free = free_[{device, stream, size}];
    char* address = nullptr;
    Memory& memory = memory_[device];
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      if (memory.reserved + size > arena.capacity) {
        ++memory.num_failures;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", device,
            " has a total capacity of ", arena.capacity, " bytes of which ", arena.capacity - memory.reserved, " are free (fake device)");
      }
      address = arenas() + device * ARENA_BYTES + arena.used;
      arena.used += size;
      TORCH_CHECK(arena.used < ARENA_BYTES, "the fake device has no address left");
      memory.reserved += size;
      memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
      Opened::extend(device, arena.used);
      Opened opened;
      std::memset(address, POISON, size);
    }
    blocks_[address] = Block{device, stream, size, {}};
    memory.in_use += size;
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.in_use);
    return address;
  }
  void free(char* address) {
    Locked locked(lock_of_all());
    auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    Block block = found->second;
    blocks_.erase(found);
    memory_[block.device].in_use -= block.size;
    std::vector<Event> uses;
    for (int stream : block.streams) uses.push_back(record(stream));
    if (uses.empty()) {
      give_back(address, block);
    } else {
      leaving_.push_back({address, block, std::move(uses)});
    }
  }
  void record_stream(const void* address, int stream) {
    Locked locked(lock_of_all());
    auto found = blocks_.find(const_cast<char*>(static_cast<const char*>(address)));
    if (found != blocks_.end() && found->second.stream != stream) found->second.streams.insert(stream);
  }
  void empty_cache() {
    Locked locked(lock_of_all());
    free_those_used_up();
    for (auto& [key, list] : free_) {
      auto [device, stream, size] = key;
      memory_[device].reserved -= size * list.size();
      spare_.insert(spare_.end(), list.begin(), list.end());  // addresses are not used again
      list.clear();
    }
  }
  struct Memory {
    size_t in_use = 0, peak = 0, allocated = 0, reserved = 0, peak_reserved = 0, num_failures = 0;
  };
  Memory& memory(int device) { return memory_.at(device); }
  void set_capacity(int device, size_t num_bytes) { arenas_.at(device).capacity = num_bytes; }
  size_t capacity(int device) { return arenas_.at(device).capacity; }

  // ---- pinned memory of the host. As torch's, it is not given to anyone else before copies that use it are done, and each
  // request is rounded up to a power of two. The context may be any that there is.
  char* allocate_pinned(size_t num_bytes, int device) {
    if (std::none_of(is_touched_.begin(), is_touched_.end(), [](const auto& one) { return one.load(); })) touch(device, "pinned memory");
    Locked locked(lock_of_all());
    for (auto it = pinned_.begin(); it != pinned_.end();) {
      if (it->second.is_freed && is_done(it->second)) {
        arrive_all(it->second.uses);
        std::free(it->first);
        it = pinned_.erase(it);
      } else {
        ++it;
      }
    }
    size_t size = std::bit_ceil(std::max<size_t>(num_bytes, 64));
    auto* address = static_cast<char*>(std::aligned_alloc(64, size));
    std::memset(address, POISON, size);
    add_pinned(address, size);
    return address;
  }
  // Memory that is not this machine's, page by page: its owner keeps it until copies that use it are done.
  void lock_pages(char* address, size_t num_bytes, int device) {
    touch(device, "a registration of host memory");
    Locked locked(lock_of_all());
    TORCH_CHECK(reinterpret_cast<uintptr_t>(address) % 4096 == 0 && num_bytes % 4096 == 0, "fake CUDA: only whole pages can be locked");
    add_pinned(address, num_bytes);
  }
  void unlock_pages(char* address) {
    Locked locked(lock_of_all());
    auto found = pinned_.find(address);
    TORCH_CHECK(found != pinned_.end(), "CUDA error: memory to be unlocked is not locked");
    if (!is_known_done(found->second)) fail("pages were unlocked before a copy that uses them was known to be done");
    pinned_bytes_ -= found->second.size;
    pinned_.erase(found);
  }
  void free_pinned(char* address) {
    Locked locked(lock_of_all());
    auto found = pinned_.find(address);
    if (found == pinned_.end()) return;
    pinned_bytes_ -= found->second.size;
    found->second.is_freed = true;
    if (is_known_done(found->second)) {
      std::memset(address, POISON, found->second.size);
      std::free(address);
      pinned_.erase(found);
    }
  }
  bool is_pinned(const void* address) {
    Locked locked(lock_of_all());
    return pinned_at(address) != nullptr;
  }
  size_t pinned_bytes() const { return pinned_bytes_; }
  size_t peak_pinned_bytes() const { return peak_pinned_bytes_; }
  void reset_peaks(int device) {
    Locked locked(lock_of_all());
    memory_[device].peak = memory_[device].in_use;
    memory_[device].peak_reserved = memory_[device].reserved;
    peak_pinned_bytes_ = pinned_bytes_;
  }

  // ---- copies

  // On one device, or from one to another.
  void copy_on_devices(const View& target, const View& source, int stream) {
    Locked locked(lock_of_all());
    count_copy("device to device", target);
    issue(stream);
    note(stream, source, false, "copy_");
    note(stream, target, true, "copy_");
    perform(stream, [target, source] { move(target, source); });
  }

  // From host memory. The host goes on at once where it is pinned and `non_blocking`, which is returned; changing the memory is an error
  // until the copy is done.
  bool copy_to_device(const View& target, const View& source, int stream, bool non_blocking) {
    Locked locked(lock_of_all());
    count_copy("host to device", target);
    bool is_async = non_blocking && (is_pinned(source.data) || is_pageable_async);
    publish_what_is_read(source);
    issue(stream);
    if (is_async) note(stream, source, false, "copy to the device");
    note(stream, target, true, "copy to the device");
    at::Tensor values = source.tensor().clone();
    perform(stream, [target, values] { move(target, View(values)); });
    if (!is_async) {
      wait_for_copy("copy from pageable memory", stream);
      return false;
    }
    use_pinned(source.data, stream);
    lent_.push_back({source, values, stream, streams_[stream]->issued});
    return true;
  }

  // To host memory, which shows the values when the host has waited for them, and NaN before. Returns whether the host went on at once.
  bool copy_to_host(const View& target, const View& source, int stream, bool non_blocking) {
    Locked locked(lock_of_all());
    count_copy("device to host", target);
    bool is_async = non_blocking && is_pinned(target.data);
    issue(stream);
    note(stream, source, false, "copy to the host");
    if (is_async) {
      note(stream, target, true, "copy to the host");
      check_lent(target);
      poison(target);
    }
    auto values = std::make_shared<at::Tensor>();
    coming_.push_back({target, values, stream, streams_[stream]->issued});
    perform(stream, [source, values] {
      Opened opened;
      *values = source.tensor().clone();
    });
    if (is_async) {
      use_pinned(target.data, stream);
    } else {
      wait_for_copy("copy to the host", stream);
    }
    return is_async;
  }

  static void move(const View& target, const View& source) {
    Opened opened;
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
    target.tensor().copy_(source.tensor());
  }

 private:
  struct Work {
    uint64_t time;
    std::function<void()> run;
  };
  struct Stream {
    int device = 0;
    std::deque<Work> waiting;
    uint64_t issued = 0, done = 0;
    Clock clock;
  };
  struct Block {
    int device, stream;
    size_t size;
    std::set<int> streams;  // that use it, too
  };
  struct Leaving {
    char* address;
    Block block;
    std::vector<Event> uses;
  };
  struct Pinned {
    size_t size;
    bool is_freed;
    std::map<int, Event> uses;  // by stream, the latest
  };
  struct Lent {  // host memory that a copy may still read
    View memory;
    at::Tensor values;
    int stream;
    uint64_t time;
  };
  struct Coming {  // values that the host does not see yet
    View memory;
    std::shared_ptr<at::Tensor> values;
    int stream;
    uint64_t time;
  };

  Machine() {
    for (int device = 0; device < MAX_DEVICES; ++device) {
      streams_.push_back(std::make_unique<Stream>());
      streams_.back()->device = device;
    }
  }

  static bool is_default(int stream) { return stream < MAX_DEVICES; }

  void run_until(int stream, uint64_t time) {
    Stream& one = *streams_.at(stream);
    while (!one.waiting.empty() && one.waiting.front().time <= time) {
      Work work = std::move(one.waiting.front());
      one.waiting.pop_front();
      work.run();
      one.done = std::max(one.done, work.time);
    }
    one.done = std::max(one.done, std::min(time, one.issued));
  }
  void run_some() {
    int stream = static_cast<int>(random() % streams_.size());
    Stream& one = *streams_[stream];
    if (!one.waiting.empty()) run_until(stream, one.waiting[random() % one.waiting.size()].time);
  }

  // The host knows that it is done.
  void arrive(const Event& event) {
    run_until(event.stream, event.time);
    join(host_, event.clock);
    std::list<Lent> over;
    for (auto it = lent_.begin(); it != lent_.end();) {
      auto next = std::next(it);
      if (time_of(host_, it->stream) >= it->time) over.splice(over.end(), lent_, it);
      it = next;
    }
    publish([this](const Coming& one) { return time_of(host_, one.stream) >= one.time; });
    for (const Lent& one : over) compare(one);
  }
  void arrive_all(const std::map<int, Event>& events) {
    for (const auto& [stream, event] : events) arrive(event);
  }
  template <typename Condition>
  void publish(Condition is_due) {
    for (auto it = coming_.begin(); it != coming_.end();) {
      if (is_due(*it)) {
        run_until(it->stream, it->time);
        it->memory.tensor().copy_(*it->values);
        it = coming_.erase(it);
      } else {
        ++it;
      }
    }
  }
  // A copy to the device reads host memory that a copy to the host wrote: `note` has seen whether that is in order.
  void publish_what_is_read(const View& source) {
    publish([&source](const Coming& one) { return one.memory.overlaps(source); });
  }
  void wait_for_copy(const char* what, int stream) {
    ++counters.host_waits[what];
    arrive(record(stream));
  }
  void compare(const Lent& one) {
    if (std::memcmp(one.values.contiguous().data_ptr(), one.memory.tensor().contiguous().data_ptr(), one.values.nbytes()) != 0) {
      fail("the host changed " + std::to_string(one.memory.num_bytes) +
           " bytes of pinned memory before a copy to the device that reads them was known to be done");
    }
  }
  void check_lent(const View& target) {
    std::list<Lent> over;
    for (auto it = lent_.begin(); it != lent_.end();) {
      auto next = std::next(it);
      if (it->memory.overlaps(target)) over.splice(over.end(), lent_, it);
      it = next;
    }
    for (const Lent& one : over) compare(one);
  }
  static void poison(const View& view) {
    at::Tensor target = view.tensor();
    at::Tensor values = at::empty(target.sizes(), target.options());
    std::memset(values.data_ptr(), POISON, values.nbytes());
    target.copy_(values);
  }

  void count_copy(const char* direction, const View& view) {
    auto& [number, bytes] = counters.copies[direction];
    ++number;
    int64_t numel = 1;
    for (int64_t size : view.sizes) numel *= size;
    bytes += numel * static_cast<int64_t>(at::elementSize(view.dtype));
  }

  void report(const Conflict& conflict) {
    auto name = [this](const Access& access) {
      return "'" + access.what + "' on " + (is_default(access.stream) ? "the default stream" : "stream " + std::to_string(access.stream)) +
             (access.is_write ? " writes" : " reads");
    };
    fail(name(conflict.later) + " " + std::to_string(conflict.num_bytes) + " bytes that " + name(conflict.earlier) +
         ", and nothing has put the two in order");
  }
  void fail(const std::string& text) {
    conflicts.push_back(text);
    TORCH_CHECK(false, "fake CUDA: ", text);
  }

  // Work of the block's own stream that is not done yet comes before its next owner's, and still finds what was there.
  void give_back(char* address, const Block& block) {
    auto spoil = [address, size = block.size] {
      Opened opened;
      std::memset(address, POISON, size);
    };
    Stream& own = *streams_.at(block.stream);
    if (own.waiting.empty()) {
      spoil();
    } else {
      own.waiting.push_back({own.issued, spoil});
    }
    free_[{block.device, block.stream, block.size}].push_back(address);
  }
  // As the caching allocator does, which asks the events without waiting for them.
  void free_those_used_up() {
    for (auto it = leaving_.begin(); it != leaving_.end();) {
      bool is_over = std::all_of(it->uses.begin(), it->uses.end(), [this](const Event& use) { return streams_[use.stream]->done >= use.time; });
      if (is_over) {
        for (const Event& use : it->uses) arrive(use);
        give_back(it->address, it->block);
        it = leaving_.erase(it);
      } else {
        ++it;
      }
    }
  }

  void add_pinned(char* address, size_t size) {
    pinned_[address] = Pinned{size, false, {}};
    pinned_bytes_ += size;
    peak_pinned_bytes_ = std::max(peak_pinned_bytes_, pinned_bytes_);
  }
  Pinned* pinned_at(const void* address) {
    auto it = pinned_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    if (it == pinned_.begin()) return nullptr;
    --it;
    return static_cast<const char*>(address) < it->first + it->second.size ? &it->second : nullptr;
  }
  void use_pinned(const void* address, int stream) {
    if (Pinned* found = pinned_at(address)) found->uses[stream] = record(stream);
  }
  bool is_done(const Pinned& one) {
    return std::all_of(one.uses.begin(), one.uses.end(), [this](const auto& use) { return streams_[use.first]->done >= use.second.time; });
  }
  bool is_known_done(const Pinned& one) {
    return std::all_of(one.uses.begin(), one.uses.end(), [this](const auto& use) { return is_known_done(use.second); });
  }

  std::vector<std::unique_ptr<Stream>> streams_;
  std::array<std::atomic<bool>, MAX_DEVICES> is_touched_{};
  std::map<int, std::string> touched_;
  Clock host_;
  History history_;
  std::array<Arena, MAX_DEVICES> arenas_;
  std::array<Memory, MAX_DEVICES> memory_;
  std::map<char*, Block> blocks_;
  std::map<std::tuple<int, int, size_t>, std::vector<char*>> free_;
  std::vector<char*> spare_;
  std::list<Leaving> leaving_;
  std::map<char*, Pinned> pinned_;
  size_t pinned_bytes_ = 0, peak_pinned_bytes_ = 0;
  std::list<Lent> lent_;
  std::list<Coming> coming_;
};

}  // namespace fake
