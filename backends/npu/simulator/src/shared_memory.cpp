// A segment is sparse: pages are allocated when first touched, so unused mailboxes cost no memory. Its name is removed
// as soon as all ranks have joined, so a crash leaves nothing behind.
#include "shared_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

namespace halsim {

struct alignas(64) Segment::Header {
  std::atomic<uint64_t> arrived;  // barriers this rank has entered
  std::atomic<uint32_t> joined;
  Announcement announcement;
};
struct alignas(64) Segment::Box {
  std::atomic<uint64_t> full;  // bytes waiting to be read, 0 = free to write
  char data[kBoxBytes];
};

void relax(int& turns) {
  if (++turns < 200) {
    sched_yield();
    return;
  }
  timespec pause{0, turns < 2000 ? 50'000 : 500'000};
  nanosleep(&pause, nullptr);
}

size_t Segment::bytes_for(uint32_t size) {
  return size * (sizeof(Header) + kSlotBytes) + size_t{size} * size * sizeof(Box);
}
char* Segment::slot(uint32_t rank) const { return base_ + size_ * sizeof(Header) + rank * kSlotBytes; }
Announcement& Segment::announcement(uint32_t rank) const {
  return reinterpret_cast<Header*>(base_)[rank].announcement;
}
Segment::Box& Segment::box(uint32_t from, uint32_t to) const {
  char* boxes = base_ + size_ * (sizeof(Header) + kSlotBytes);
  return reinterpret_cast<Box*>(boxes)[from * size_ + to];
}

Segment* Segment::join(const std::string& name, uint32_t rank, uint32_t size, int64_t timeout_ms, std::string* why) {
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  size_t bytes = bytes_for(size);
  if (file < 0 || ftruncate(file, bytes)) {
    *why = "shared memory " + name + ": " + strerror(errno);
    if (file >= 0) close(file);
    return nullptr;
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (base == MAP_FAILED) {
    *why = "mapping shared memory " + name + ": " + strerror(errno);
    return nullptr;
  }
  auto* segment = new Segment;
  segment->name_ = name, segment->base_ = static_cast<char*>(base), segment->rank_ = rank, segment->size_ = size;
  auto* headers = static_cast<Header*>(base);
  headers[rank].joined.store(1);
  Deadline deadline(timeout_ms);
  for (int turns = 0; !std::all_of(headers, headers + size, [](const Header& h) { return h.joined.load(); });) {
    if (deadline.passed()) {
      *why = "not every rank joined within " + std::to_string(timeout_ms) + " ms; missing:";
      for (uint32_t r = 0; r < size; r++)
        if (!headers[r].joined.load()) *why += " " + std::to_string(r);
      delete segment;
      return nullptr;
    }
    relax(turns);
  }
  shm_unlink(name.c_str());  // all ranks have mapped it; only the first call finds a name to remove
  return segment;
}

Segment::~Segment() {
  shm_unlink(name_.c_str());  // exists only if joining failed
  munmap(base_, bytes_for(size_));
}

bool Segment::barrier(const Deadline& deadline) {
  auto* headers = reinterpret_cast<Header*>(base_);
  uint64_t mine = headers[rank_].arrived.fetch_add(1) + 1;
  for (uint32_t r = 0; r < size_; r++)
    for (int turns = 0; headers[r].arrived.load(std::memory_order_acquire) < mine; relax(turns))
      if (deadline.passed()) return false;
  return true;
}

std::vector<uint32_t> Segment::absent() const {
  auto* headers = reinterpret_cast<Header*>(base_);
  std::vector<uint32_t> result;
  for (uint32_t r = 0; r < size_; r++)
    if (headers[r].arrived.load() < headers[rank_].arrived.load()) result.push_back(r);
  return result;
}

size_t Segment::push(uint32_t peer, const char* data, size_t bytes) {
  Box& out = box(rank_, peer);
  if (out.full.load(std::memory_order_acquire)) return 0;
  size_t part = std::min(bytes, kBoxBytes);
  memcpy(out.data, data, part);
  out.full.store(part, std::memory_order_release);
  return part;
}

size_t Segment::pull(uint32_t peer, char* data, size_t bytes) {
  Box& in = box(peer, rank_);
  size_t part = in.full.load(std::memory_order_acquire);
  if (!part || part > bytes) return 0;
  memcpy(data, in.data, part);
  in.full.store(0, std::memory_order_release);
  return part;
}

}  // namespace halsim
