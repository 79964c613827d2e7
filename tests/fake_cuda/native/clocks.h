// Who may touch memory when: vector clocks, and what was last read and written where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fake {

// For each stream, by its number, how much of its work has come before. The host has one too.
using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) {
    if (into[i] < other[i]) into[i] = other[i];
  }
}

inline uint64_t time_of(const Clock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

struct Access {
  int stream = -1;  // none
  uint64_t time = 0;
  bool is_write = false;
  std::string what;

  // Whether it has ended before whatever has this clock begins.
  bool is_before(const Clock& clock) const { return stream < 0 || time_of(clock, stream) >= time; }
};

struct Conflict {
  Access earlier, later;
  size_t num_bytes = 0;  // of the first stretch of memory that both use
};

// The accesses to one range of addresses that a later one may still be in conflict with. Freeing memory changes nothing here: who gets
// it next must come after those who had it.
class History {
 public:
  // Note an access to [low, high) by work that has this clock; return one that nothing has put into an order with it.
  std::optional<Conflict> note(uintptr_t low, uintptr_t high, const Access& access, const Clock& clock) {
    if (low >= high) return std::nullopt;
    split(low);
    split(high);
    fill_gaps(low, high);
    std::optional<Conflict> found;
    for (auto it = segments_.find(low); it != segments_.end() && it->first < high; ++it) {
      Segment& segment = it->second;
      if (!found && !segment.written.is_before(clock)) found = Conflict{segment.written, access, segment.end - it->first};
      if (access.is_write) {
        for (const Access& read : segment.reads) {
          if (!found && !read.is_before(clock)) found = Conflict{read, access, segment.end - it->first};
        }
        segment.written = access;
        segment.reads.clear();
      } else {
        add_read(segment.reads, access);
      }
    }
    if (access.is_write) unite(low, high);
    return found;
  }

 private:
  struct Segment {
    uintptr_t end;
    Access written;
    std::vector<Access> reads;  // at most one of each stream: its latest
  };

  void split(uintptr_t at) {
    auto it = segments_.upper_bound(at);
    if (it == segments_.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Segment second = it->second;
    it->second.end = at;
    segments_.emplace(at, std::move(second));
  }

  void fill_gaps(uintptr_t low, uintptr_t high) {
    uintptr_t at = low;
    auto it = segments_.lower_bound(low);
    while (at < high) {
      uintptr_t next = it == segments_.end() ? high : std::min<uintptr_t>(it->first, high);
      if (at < next) segments_.emplace(at, Segment{next, {}, {}});
      if (next >= high) break;
      at = it->second.end;
      ++it;
    }
  }

  // What was written at once is one stretch, so that the number of stretches does not grow.
  void unite(uintptr_t low, uintptr_t high) {
    auto first = segments_.find(low);
    first->second.end = high;
    segments_.erase(std::next(first), segments_.lower_bound(high));
  }

  static void add_read(std::vector<Access>& reads, const Access& access) {
    for (Access& read : reads) {
      if (read.stream == access.stream) {
        read = access;
        return;
      }
    }
    reads.push_back(access);
  }

  std::map<uintptr_t, Segment> segments_;  // by their first address
};

}  // namespace fake
