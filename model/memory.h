// Memories: bytes, which of them were ever written, and the order of accesses to them.

#ifndef MODEL_MEMORY_H_
#define MODEL_MEMORY_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "order.h"

namespace model {

// For every word of 4 bytes the last write, and the reads since. An access that is not ordered
// after a conflicting earlier one is a race. Accesses narrower than a word count as accesses of the
// word.
class Shadow {
 public:
  // place: what a word is called in reports.
  Shadow(std::function<std::string(size_t word)> place, size_t words, const Agents& agents)
      : place_(std::move(place)),
        agents_(agents),
        whole_((words + kWords - 1) / kWords),
        split_(whole_.size()) {}

  void Read(size_t first, size_t words, const Actor& actor);
  void Write(size_t first, size_t words, const Actor& actor);
  // Every access so far is ordered before the actor's; no mark is left.
  void CheckFollowsAll(size_t first, size_t words, const Actor& actor);
  void Forget(size_t first, size_t words);

 private:
  static constexpr size_t kWords = 4;  // that share a cell, until one of them is accessed alone

  struct Cell {
    Event write;
    Event read;
    uint32_t more_reads = 0;  // index + 1 into pool_
    bool generic_write = false;
  };
  struct More {
    Event read;
    uint32_t next;
  };

  // Calls f(cell, its first word) for the cells of these words.
  template <typename F>
  void ForCells(size_t first, size_t words, F f);
  uint32_t NewMore(Event read, uint32_t next);
  void Split(size_t chunk);

  [[noreturn]] void Race(const char* what, size_t word, Event earlier, bool earlier_write,
                         bool generic, const Actor& actor) const;
  void CheckReads(const Cell& cell, size_t word, const Actor& actor) const;
  void DropReads(Cell& cell);

  std::function<std::string(size_t)> place_;
  Agents agents_;
  std::vector<Cell> whole_;
  std::vector<std::unique_ptr<std::array<Cell, kWords>>> split_;  // null: the chunk is whole
  std::vector<More> pool_;
  uint32_t free_ = 0;
};

struct Allocation {
  Allocation(std::string name, uint64_t base, size_t size, bool writable)
      : name(std::move(name)), base(base), writable(writable), bytes(size), written(size) {}

  std::string name;
  uint64_t base;
  bool writable;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> written;    // 1: holds a value
  const Agents* agents = nullptr;  // of the launch under way
  std::unique_ptr<Shadow> shadow;  // of the launch under way; made at its first write
  // What device code stored by plain stores, in slots of a tensor map's size: who, and whether it
  // was released to the tensormap proxy since.
  struct Slot {
    Agent writer = 0;
    bool released = false;
    bool map = false;      // tensormap.replace was applied to it
    uint64_t version = 0;  // grows with every store
    Event release;         // that of this launch
  };
  static constexpr uint64_t kSlot = 128;
  std::map<uint64_t, Slot> slots;         // by offset
  std::map<uint64_t, bool> atomic_words;  // accessed by atomics in the launch under way

  // Bounds and permission are checked by GlobalMemory::Find and here.
  void Read(uint64_t address, uint64_t bytes, void* into, const Actor& actor,
            uint64_t used_bytes = ~uint64_t{0});
  void Write(uint64_t address, uint64_t bytes, const void* from, const Actor& actor);
  void CheckNotAtomic(uint64_t offset, uint64_t bytes) const;
  void MarkSlots(uint64_t address, uint64_t bytes, Agent writer, bool map);
  // Of the map at `address`: 0 if device code stored nothing there, else other after every store.
  // `released` becomes false if it was not released before what the actor does.
  uint64_t MapVersion(uint64_t address, bool* released, const Actor& actor) const;
};

// PTX ISA, state spaces: .global. Addresses are the model's own.
class GlobalMemory {
 public:
  uint64_t Allocate(std::string name, size_t size, uint64_t align, bool writable);
  void Free(uint64_t base);
  // The allocation that holds [address, address + bytes), or a fault.
  Allocation& Find(uint64_t address, uint64_t bytes, const char* access);
  std::map<uint64_t, Allocation>& allocations() { return allocations_; }

 private:
  std::map<uint64_t, Allocation> allocations_;  // by base
  uint64_t next_ = uint64_t{0x7f} << 40;
};

}  // namespace model

#endif  // MODEL_MEMORY_H_
