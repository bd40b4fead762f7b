#include "memory.h"

#include <algorithm>

#include "fault.h"

namespace model {

void Shadow::Race(const char* what, size_t word, Event earlier, bool earlier_write, bool generic,
                  const Actor& actor) const {
  const bool only_fence =
      earlier_write && generic && actor.async && actor.knowledge->all.Has(earlier);
  Raise(only_fence ? "proxy" : "race", place_(word), ": ", what, " by ", agents_.Name(actor.event),
        " is not ordered after the ", earlier_write ? "write" : "read", " by ",
        agents_.Name(earlier), only_fence ? ": no fence.proxy.async between them" : "");
}

void Shadow::CheckReads(const Cell& cell, size_t word, const Actor& actor) const {
  if (!actor.Follows(cell.read, false)) Race("write", word, cell.read, false, false, actor);
  for (uint32_t at = cell.more_reads; at != 0; at = pool_[at - 1].next) {
    if (!actor.Follows(pool_[at - 1].read, false)) {
      Race("write", word, pool_[at - 1].read, false, false, actor);
    }
  }
}

void Shadow::DropReads(Cell& cell) {
  cell.read = {};
  while (cell.more_reads != 0) {
    More& more = pool_[cell.more_reads - 1];
    const uint32_t next = more.next;
    more.next = free_;
    free_ = cell.more_reads;
    cell.more_reads = next;
  }
}

uint32_t Shadow::NewMore(Event read, uint32_t next) {
  uint32_t at = free_;
  if (at != 0) {
    free_ = pool_[at - 1].next;
  } else {
    pool_.emplace_back();
    at = pool_.size();
  }
  pool_[at - 1] = {read, next};
  return at;
}

void Shadow::Split(size_t chunk) {
  split_[chunk] = std::make_unique<std::array<Cell, kWords>>();
  const Cell& whole = whole_[chunk];
  for (Cell& cell : *split_[chunk]) {
    cell = whole;
    cell.more_reads = 0;
    for (uint32_t at = whole.more_reads; at != 0; at = pool_[at - 1].next) {
      cell.more_reads = NewMore(pool_[at - 1].read, cell.more_reads);
    }
  }
  DropReads(whole_[chunk]);
}

template <typename F>
void Shadow::ForCells(size_t first, size_t words, F f) {
  for (size_t word = first; word < first + words;) {
    const size_t chunk = word / kWords;
    const bool all = word % kWords == 0 && word + kWords <= first + words;
    if (!split_[chunk] && !all) Split(chunk);
    if (!split_[chunk]) {
      f(whole_[chunk], word);
      word += kWords;
    } else {
      f((*split_[chunk])[word % kWords], word);
      ++word;
    }
  }
}

void Shadow::Read(size_t first, size_t words, const Actor& actor) {
  ForCells(first, words, [&](Cell& cell, size_t word) {
    if (!actor.Follows(cell.write, cell.generic_write)) {
      Race("read", word, cell.write, true, cell.generic_write, actor);
    }
    // A read that this one follows need not be kept: who follows this one follows it too. But not
    // of an engine's: its completion tells of nothing else.
    const bool thread = actor.event.agent == actor.issuer.agent;
    auto covers = [&](Event read) {
      return read.agent == 0 || read.agent == actor.event.agent ||
             (thread && actor.Follows(read, false));
    };
    if (covers(cell.read)) {
      cell.read = actor.event;
      return;
    }
    uint32_t at = cell.more_reads;
    while (at != 0 && !covers(pool_[at - 1].read)) at = pool_[at - 1].next;
    if (at != 0) {
      pool_[at - 1].read = actor.event;
    } else {
      cell.more_reads = NewMore(actor.event, cell.more_reads);
    }
  });
}

void Shadow::Write(size_t first, size_t words, const Actor& actor) {
  ForCells(first, words, [&](Cell& cell, size_t word) {
    if (!actor.Follows(cell.write, cell.generic_write)) {
      Race("write", word, cell.write, true, cell.generic_write, actor);
    }
    CheckReads(cell, word, actor);
    DropReads(cell);
    cell.write = actor.event;
    cell.generic_write = !actor.async && !actor.tcgen05;
  });
}

void Shadow::CheckFollowsAll(size_t first, size_t words, const Actor& actor) {
  ForCells(first, words, [&](Cell& cell, size_t word) {
    if (!actor.Follows(cell.write, cell.generic_write)) {
      Race("release", word, cell.write, true, cell.generic_write, actor);
    }
    CheckReads(cell, word, actor);
  });
}

void Shadow::Forget(size_t first, size_t words) {
  ForCells(first, words, [&](Cell& cell, size_t) {
    DropReads(cell);
    cell.write = {};
  });
}

void Allocation::CheckNotAtomic(uint64_t offset, uint64_t bytes) const {
  if (atomic_words.empty()) return;
  auto at = atomic_words.lower_bound(offset / 4 * 4);
  if (at != atomic_words.end() && at->first < offset + bytes) {
    Raise("race", "plain access to byte ", at->first, " of ", name,
          ", which atomics access in the same launch");
  }
}

void Allocation::Read(uint64_t address, uint64_t size, void* into, const Actor& actor,
                      uint64_t used_bytes) {
  const uint64_t offset = address - base;
  CheckNotAtomic(offset, size);
  for (uint64_t i = 0; i < size; ++i) {
    if (!written[offset + i] && (i >= 64 || used_bytes >> i & 1)) {
      Raise("uninitialized", "read of byte ", offset + i, " of ", name, ", never written");
    }
  }
  if (writable) {
    if (!shadow)
      shadow = std::make_unique<Shadow>(
          [this](size_t word) { return Text("byte ", word * 4, " of ", name); },
          (bytes.size() + 3) / 4, *agents);
    shadow->Read(offset / 4, (offset % 4 + size + 3) / 4, actor);
  }
  std::copy_n(bytes.begin() + offset, size, static_cast<uint8_t*>(into));
}

void Allocation::Write(uint64_t address, uint64_t size, const void* from, const Actor& actor) {
  const uint64_t offset = address - base;
  if (!writable) Raise("bounds", "write to byte ", offset, " of ", name, ", which is only read");
  CheckNotAtomic(offset, size);
  if (!shadow)
    shadow = std::make_unique<Shadow>(
        [this](size_t word) { return Text("byte ", word * 4, " of ", name); },
        (bytes.size() + 3) / 4, *agents);
  shadow->Write(offset / 4, (offset % 4 + size + 3) / 4, actor);
  std::copy_n(static_cast<const uint8_t*>(from), size, bytes.begin() + offset);
  std::fill_n(written.begin() + offset, size, 1);
}

void Allocation::MarkSlots(uint64_t address, uint64_t size, Agent writer, bool map) {
  for (uint64_t at = (address - base) / kSlot * kSlot; at < address - base + size; at += kSlot) {
    Slot& slot = slots[at];
    slot = {writer, false, slot.map || map, slot.version + 1, {}};
  }
}

uint64_t Allocation::MapVersion(uint64_t address, bool* released, const Actor& actor) const {
  uint64_t version = 0;
  const uint64_t offset = address - base;
  for (auto at = slots.lower_bound(offset / kSlot * kSlot);
       at != slots.end() && at->first < offset + kSlot; ++at) {
    const Slot& slot = at->second;
    version += slot.version;
    if (!slot.released || !actor.Follows(slot.release, false)) *released = false;
  }
  return version;
}

uint64_t GlobalMemory::Allocate(std::string name, size_t size, uint64_t align, bool writable) {
  const uint64_t base = (next_ + align - 1) / align * align;
  // A gap: an access past the end hits no neighbour.
  next_ = base + size + (uint64_t{1} << 20);
  allocations_.emplace(base, Allocation(std::move(name), base, size, writable));
  return base;
}

void GlobalMemory::Free(uint64_t base) {
  if (allocations_.erase(base) == 0) throw std::runtime_error("no allocation at this address");
}

Allocation& GlobalMemory::Find(uint64_t address, uint64_t bytes, const char* access) {
  auto after = allocations_.upper_bound(address);
  if (after != allocations_.begin()) {
    Allocation& found = std::prev(after)->second;
    if (address - found.base + bytes <= found.bytes.size()) return found;
    if (address - found.base < found.bytes.size() + (uint64_t{1} << 19)) {
      Raise("bounds", access, " of ", bytes, " bytes at byte ", address - found.base, " of ",
            found.name, ", which has ", found.bytes.size());
    }
  }
  Raise("bounds", access, " of ", bytes, " bytes at 0x", std::hex, address,
        ", where nothing is allocated");
}

}  // namespace model
