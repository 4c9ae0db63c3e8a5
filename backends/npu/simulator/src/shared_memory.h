// The shared memory of a communicator's processes: a POSIX segment with a slot per rank, a barrier, and a mailbox per
// pair of ranks. Every wait has a deadline, so that no rank blocks forever when a peer has exited.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace halsim {

constexpr size_t kSlotBytes = size_t{1} << 20, kBoxBytes = size_t{1} << 18;

// Announced by every rank before a collective runs, to detect ranks that call different collectives.
struct Announcement {
  uint32_t kind, dtype, op, root;
  uint64_t count;
  bool operator==(const Announcement& o) const {
    return kind == o.kind && dtype == o.dtype && op == o.op && root == o.root && count == o.count;
  }
};

class Deadline {
 public:
  explicit Deadline(int64_t ms) : end_(std::chrono::steady_clock::now() + std::chrono::milliseconds(ms)) {}
  bool passed() const { return std::chrono::steady_clock::now() > end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

class Segment {
 public:
  // Joins the segment `name` as `rank` of `size`, creating it if needed; null if not all ranks join in time.
  static Segment* join(const std::string& name, uint32_t rank, uint32_t size, int64_t timeout_ms, std::string* why);
  ~Segment();

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  char* slot(uint32_t rank) const;
  Announcement& announcement(uint32_t rank) const;

  // Returns false when the deadline passes first; `absent` then lists the ranks that had not arrived.
  bool barrier(const Deadline& deadline);
  std::vector<uint32_t> absent() const;

  // Transfers as much of a message to or from `peer` as fits now; returns the bytes transferred (0: try again later).
  size_t push(uint32_t peer, const char* data, size_t bytes);
  size_t pull(uint32_t peer, char* data, size_t bytes);

 private:
  struct Header;
  struct Box;
  Box& box(uint32_t from, uint32_t to) const;
  static size_t bytes_for(uint32_t size);

  std::string name_;
  char* base_ = nullptr;
  uint32_t rank_ = 0, size_ = 0;
};

// Yields the processor, for longer the more often it has been called during one wait.
void relax(int& turns);

}  // namespace halsim
