// Loads, stores, atomics, matrix stores, remote stores: PTX ISA 9.7.9, 9.7.13.5, 9.7.14.

#include <array>
#include <map>

#include "../decode.h"

namespace model {
namespace {

struct Vector {
  uint32_t elements, bytes;  // bytes: of an element
  std::string type;
};

// The register's value after a load: zero- or sign-extended to it (9.4.1, operand size exceeding
// instruction-type size).
uint64_t Extended(uint64_t bits, const Vector& v) {
  if (v.type[0] != 's' || v.bytes == 8) return bits;
  const uint32_t shift = 64 - 8 * v.bytes;
  // To 64 bits: who reads a narrower register takes its low bits.
  return static_cast<uint64_t>(static_cast<int64_t>(bits << shift) >> shift);
}

// [.weak].vec.type
Vector VectorOf(Decoder& d) {
  Vector v{1, 0, d.Next()};
  if (v.type[0] == 'v') {
    if (v.type != "v2" && v.type != "v4" && v.type != "v8") d.Unknown("a vector ." + v.type);
    v.elements = v.type[1] - '0';
    v.type = d.Next();
  }
  v.bytes = BytesOf(d, v.type);
  return v;
}

// PTX ISA 6.4.1: an access is aligned to its whole size.
void CheckAligned(uint64_t address, uint32_t bytes, const char* access) {
  if (address % bytes != 0) {
    Raise("alignment", access, " of ", bytes, " bytes at 0x", std::hex, address,
          " is not aligned to its size");
  }
}

// An own-CTA address: the window of shared::cta lies inside that of shared::cluster.
Cta& OwnShared(Warp& w, uint32_t address, uint32_t* offset, const char* access) {
  Cta& cta = w.cta.cluster.At(address, offset, access);
  if (&cta != &w.cta)
    Raise("bounds", access, " of shared::cta memory in CTA ", cta.rank, " by CTA ", w.cta.rank);
  return cta;
}

template <typename Reader>
Execute Load(Decoder& d, Reader read) {
  const Vector v = VectorOf(d);
  const std::vector<Register> out = d.Dests(0);
  if (out.size() != v.elements) d.Unknown("a vector of this size");
  const Address at = d.At(1);
  const uint64_t used = v.elements > 1 ? d.UsedBytes() : ~uint64_t{0};
  return [=](Warp& w, Mask m) {
    const uint64_t* base = w.Read(at.base, m);
    std::array<std::array<uint64_t, kLanes>, 8> values{};
    const uint32_t bytes = v.elements * v.bytes;
    ForLanes(m, [&](uint32_t lane) {
      uint8_t buffer[64] = {};
      const uint64_t address = at.Of(base, lane);
      CheckAligned(address, bytes, "load");
      read(w, lane, address, bytes, buffer, used);
      for (uint32_t i = 0; i < v.elements; ++i) {
        uint64_t bits = 0;
        std::memcpy(&bits, buffer + i * v.bytes, v.bytes);
        values[i][lane] = Extended(bits, v);
      }
    });
    for (uint32_t i = 0; i < v.elements; ++i) {
      uint64_t* z = w.Write(out[i], m);
      ForLanes(m, [&](uint32_t lane) { z[lane] = values[i][lane]; });
    }
    return Outcome::kNext;
  };
}

template <typename Writer>
Execute Store(Decoder& d, Writer write) {
  const Vector v = VectorOf(d);
  const Address at = d.At(0);
  const std::vector<Register> from = d.Sources(1);
  if (from.size() != v.elements) d.Unknown("a vector of this size");
  return [=](Warp& w, Mask m) {
    const uint64_t* base = w.Read(at.base, m);
    std::array<const uint64_t*, 8> values{};
    for (uint32_t i = 0; i < v.elements; ++i) values[i] = w.Read(from[i], m);
    const uint32_t bytes = v.elements * v.bytes;
    ForLanes(m, [&](uint32_t lane) {
      uint8_t buffer[64];
      for (uint32_t i = 0; i < v.elements; ++i)
        std::memcpy(buffer + i * v.bytes, &values[i][lane], v.bytes);
      const uint64_t address = at.Of(base, lane);
      CheckAligned(address, bytes, "store");
      write(w, lane, address, bytes, buffer);
    });
    return Outcome::kNext;
  };
}

void ReadGlobal(Warp& w, uint32_t lane, uint64_t address, uint32_t bytes, void* into,
                uint64_t used) {
  w.machine.global.Find(address, bytes, "load").Read(address, bytes, into, w.Generic(lane), used);
}

INSTRUCTION(LdParam, "ld.param", "9.7.9.8 ld") { return Load(d, ReadGlobal); }
INSTRUCTION(LdGlobal, "ld.global", "9.7.9.8 ld") { return Load(d, ReadGlobal); }
INSTRUCTION(LdShared, "ld.shared", "9.7.9.8 ld") {
  return Load(d, [](Warp& w, uint32_t lane, uint64_t address, uint32_t bytes, void* into,
                    uint64_t used) {
    uint32_t offset;
    OwnShared(w, address, &offset, "load").ReadShared(offset, bytes, into, w.Generic(lane), used);
  });
}

INSTRUCTION(StGlobal, "st.global", "9.7.9.11 st") {
  return Store(d, [](Warp& w, uint32_t lane, uint64_t address, uint32_t bytes, const void* from) {
    Allocation& allocation = w.machine.global.Find(address, bytes, "store");
    allocation.Write(address, bytes, from, w.Generic(lane));
    allocation.MarkSlots(address, bytes, w.ThreadAgent(lane), false);
  });
}
INSTRUCTION(StShared, "st.shared", "9.7.9.11 st") {
  return Store(d, [](Warp& w, uint32_t lane, uint64_t address, uint32_t bytes, const void* from) {
    uint32_t offset;
    OwnShared(w, address, &offset, "store").WriteShared(offset, bytes, from, w.Generic(lane));
  });
}

// Relaxed, of the GPU's scope: orders nothing.
INSTRUCTION(AtomAdd, "atom.global.add.u32", "9.7.13.5 atom") {
  const Register out = d.Dest(0), by = d.Source(2);
  const Address at = d.At(1);
  return [=](Warp& w, Mask m) {
    const uint64_t *base = w.Read(at.base, m), *add = w.Read(by, m);
    Lanes old{};
    ForLanes(m, [&](uint32_t lane) {
      const uint64_t address = at.Of(base, lane);
      CheckAligned(address, 4, "atomic");
      Allocation& allocation = w.machine.global.Find(address, 4, "atomic");
      if (!allocation.writable)
        Raise("bounds", "atomic on ", allocation.name, ", which is only read");
      const uint64_t offset = address - allocation.base;
      // After the plain accesses of this launch; among themselves atomics need no order.
      if (allocation.shadow) allocation.shadow->CheckFollowsAll(offset / 4, 1, w.Generic(lane));
      allocation.atomic_words[offset] = true;
      for (uint64_t i = offset; i < offset + 4; ++i) {
        if (!allocation.written[i])
          Raise("uninitialized", "atomic on byte ", i, " of ", allocation.name, ", never written");
      }
      uint32_t value;
      std::memcpy(&value, &allocation.bytes[offset], 4);
      old[lane] = value;
      value += static_cast<uint32_t>(add[lane]);
      std::memcpy(&allocation.bytes[offset], &value, 4);
    });
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t lane) { z[lane] = old[lane]; });
    return Outcome::kNext;
  };
}

// Lanes 8 i to 8 i + 7 give the rows of matrix i; lane l holds row l / 4, columns 2 (l % 4) and the
// next, of each matrix; transposed, column l / 4, rows 2 (l % 4) and the next.
INSTRUCTION(Stmatrix, "stmatrix", "9.7.14.5.16 stmatrix") {
  const auto take = [&d](const char* modifier) {
    if (!d.Take(modifier)) d.Unknown("stmatrix of this form");
  };
  for (const char* modifier : {"sync", "aligned", "m8n8", "x4"}) take(modifier);
  const bool transposed = d.Take("trans");
  for (const char* modifier : {"shared", "b16"}) take(modifier);
  const Address at = d.At(0);
  const std::vector<Register> from = d.Sources(1);
  if (from.size() != 4) d.Unknown("a vector of this size");
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    if (m != ~Mask{0}) Raise("unknown", "stmatrix by a warp with exited threads");
    const uint64_t* rows = w.Read(at.base, m);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint64_t* values = w.Read(from[i], m);
      for (uint32_t word = 0; word < kLanes; ++word) {
        const uint32_t row = word / 4, columns = word % 4;
        const uint64_t address = at.Of(rows, 8 * i + row);
        CheckAligned(address, 16, "row of stmatrix");
        uint32_t offset;
        Cta& cta = OwnShared(w, address, &offset, "stmatrix");
        // The lane that writes the word, and what: transposed, a half of its own and one of the
        // lane that holds the next column.
        const uint32_t lane = transposed ? 8 * columns + row / 2 : word;
        uint64_t value = values[lane];
        if (transposed) {
          const uint32_t shift = row % 2 * 16;
          value = (values[lane] >> shift & 0xFFFF) | (values[lane + 4] >> shift & 0xFFFF) << 16;
        }
        cta.WriteShared(offset + columns * 4, 4, &value, w.Generic(lane));
      }
    }
    return Outcome::kNext;
  };
}

// A generic-proxy store that is under way by itself; its bytes complete at an mbarrier of the same
// CTA.
INSTRUCTION(StAsync, "st.async", "9.7.9.12 st.async") {
  d.Take("weak");
  if (!d.Take("shared::cluster") || !d.Take("mbarrier::complete_tx::bytes"))
    d.Unknown("st.async of this form");
  const Vector v = VectorOf(d);
  if (v.bytes < 4 || v.elements > 4) d.Unknown("st.async of this type");
  const Address at = d.At(0), barrier = d.At(2);
  const std::vector<Register> from = d.Sources(1);
  if (from.size() != v.elements) d.Unknown("a vector of this size");
  return [=](Warp& w, Mask m) {
    const uint64_t *to = w.Read(at.base, m), *where = w.Read(barrier.base, m);
    std::array<const uint64_t*, 4> values{};
    for (uint32_t i = 0; i < v.elements; ++i) values[i] = w.Read(from[i], m);
    const uint32_t bytes = v.elements * v.bytes;
    Cluster& cluster = w.cta.cluster;
    if (cluster.ctas.size() == 1) Raise("unknown", "st.async outside a cluster of several CTAs");
    // What a warp's lanes send to one mbarrier is one operation: they do not order it, and an event
    // for each would be thousands.
    struct Store {
      uint32_t offset;
      std::array<uint8_t, 32> data;
      Event issuer;
      SharedKnowledge knowledge;
    };
    std::map<std::pair<Cta*, uint32_t>, std::vector<Store>> stores;
    ForLanes(m, [&](uint32_t lane) {
      uint32_t offset, barrier_offset;
      Cta& cta = cluster.At(at.Of(to, lane), &offset, "st.async");
      Cta& of_barrier = cluster.At(barrier.Of(where, lane), &barrier_offset, "st.async");
      if (&cta != &of_barrier)
        Raise("barrier", "st.async to CTA ", cta.rank, " with an mbarrier of CTA ",
              of_barrier.rank);
      cta.CheckShared(offset, bytes, bytes, "st.async");
      Store store{offset, {}, w.Now(lane), w.KnowledgeOf(lane)};
      for (uint32_t i = 0; i < v.elements; ++i)
        std::memcpy(&store.data[i * v.bytes], &values[i][lane], v.bytes);
      CheckInitKnown(w, lane, cta, barrier_offset, "st.async");
      auto& others = stores[{&cta, barrier_offset}];
      for (const Store& other : others) {
        if (offset < other.offset + bytes && other.offset < offset + bytes)
          Raise("race", "st.async of two lanes to the same bytes of CTA ", cta.rank);
      }
      others.push_back(std::move(store));
    });
    for (auto& [place, sent] : stores) {
      const auto [cta, barrier_offset] = place;
      const Event event = cluster.Start();
      cluster.Touch(*cta, event);
      cluster.Post(Operation::kRemoteStore, kUnordered, Text("st.async to CTA ", cta->rank),
                   [&cluster, cta = cta, barrier_offset = barrier_offset, sent = std::move(sent),
                    event, bytes] {
                     for (const Store& store : sent) {
                       const Actor by{event, store.issuer, store.knowledge.get()};
                       cta->WriteShared(store.offset, bytes, store.data.data(), by);
                     }
                     cluster.CompleteTx(*cta, barrier_offset, bytes * sent.size(), event);
                   },
                   {event.agent});
    }
    w.Tick();
    return Outcome::kNext;
  };
}

}  // namespace
}  // namespace model
