// The copy engine: PTX ISA 9.7.9.27 (tensor copies), 9.7.9.28 (tensormap.replace).

#include <algorithm>
#include <cstring>

#include "../decode.h"
#include "../floats.h"
#include "../tensor_map.h"

namespace model {
namespace {

constexpr uint32_t kSharedAlignment = 128;

// A map in a kernel's parameters, or in global memory; there, if device code wrote it, only after
// the fences of the tensormap proxy: a launch's start does not acquire for it (8.9.4).
// `reader` is whose read of it is: it must not change until that is over.
TensorMap MapAt(Warp& w, uint32_t lane, uint64_t address, Event reader) {
  if (address % 64 != 0)
    Raise("alignment", "a tensor map at 0x", std::hex, address, ", not aligned to 64 bytes");
  Allocation& allocation = w.machine.global.Find(address, kMapBytes, "tensor map");
  const uint64_t offset = address - allocation.base;
  bool released = true;
  const uint64_t version = allocation.MapVersion(address, &released, w.Generic(lane));
  if (version != 0) {
    if (!released) {
      Raise("proxy", "the tensor map at byte ", offset, " of ", allocation.name,
            " was not released by its writer");
    }
    bool acquired = false;
    const SharedKnowledge knowledge = w.KnowledgeOf(lane);
    for (const auto& [by, of] : w.cta.acquired_maps[address]) {
      const bool known = by.agent == w.ThreadAgent(lane) || knowledge->all.Has(by);
      acquired = acquired || (of == version && known);
    }
    if (!acquired) {
      Raise("proxy", "the tensor map at byte ", offset, " of ", allocation.name,
            " is used without a fence.proxy.tensormap::generic.acquire before");
    }
  }
  uint8_t bytes[kMapBytes];
  const SharedKnowledge knowledge = w.KnowledgeOf(lane);
  const Actor by{reader, w.Now(lane), knowledge.get()};
  allocation.Read(address, kMapBytes / 2, bytes, by);
  // The other half holds nothing, and some write only the first; but who writes it is to be
  // ordered.
  const auto half = allocation.written.begin() + offset + kMapBytes / 2;
  if (std::find(half, half + kMapBytes / 2, 0) == half + kMapBytes / 2)
    allocation.Read(address + kMapBytes / 2, kMapBytes / 2, bytes + kMapBytes / 2, by);
  const TensorMap map = DecodeTensorMap(bytes);
  // As cuTensorMapEncodeTiled wants it; device code may have put another address there.
  if (map.address % 16 != 0)
    Raise("alignment", "a tensor map of 0x", std::hex, map.address, ", not aligned to 16 bytes");
  return map;
}

// A box's rows: bytes that lie side by side in global and, but for the swizzle, in shared memory.
struct Row {
  uint64_t address;  // of element 0, in bounds or not
  bool inside;       // in all dimensions but the innermost
};

struct Box {
  TensorMap map;
  int64_t x;  // innermost coordinate
  uint32_t row_bytes;
  uint64_t first, count;  // elements of a row that are in bounds
  std::vector<Row> rows;
  uint32_t Bytes() const { return row_bytes * rows.size(); }
};

Box BoxAt(const TensorMap& map, const std::vector<int64_t>& at) {
  Box box{map, at[0], map.box[0] * map.element_bytes, 0, 0, {}};
  if (static_cast<int>(at.size()) != map.rank)
    Raise("bounds", at.size(), " coordinates for a tensor of rank ", map.rank);
  if (box.row_bytes % 16 != 0) Raise("unknown", "a box of ", box.row_bytes, " bytes a row");
  if (map.swizzle != 0 && box.row_bytes > 16u << map.swizzle)
    Raise("unknown", "a box wider than its swizzle");
  const int64_t begin = std::clamp<int64_t>(-at[0], 0, map.box[0]);
  const int64_t end =
      std::clamp<int64_t>(static_cast<int64_t>(map.dims[0]) - at[0], begin, map.box[0]);
  box.first = begin;
  box.count = end - begin;
  uint64_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (uint64_t row = 0; row < rows; ++row) {
    Row r{map.address + at[0] * map.element_bytes, true};
    uint64_t rest = row;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t c = at[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      r.inside = r.inside && c >= 0 && c < static_cast<int64_t>(map.dims[i]);
      r.address += c * map.strides[i];
    }
    box.rows.push_back(r);
  }
  return box;
}

// Where byte `i` of a box lies; chunks of 16 bytes stay together.
uint32_t Place(const Box& box, uint32_t shared, uint32_t i) {
  return Swizzled(shared + i, box.map.swizzle);
}

void CheckBox(const Cta& cta, const Box& box, uint32_t shared, const char* access) {
  cta.CheckShared(shared, box.Bytes(), kSharedAlignment, access);
  // The swizzle moves chunks within blocks of 128 bytes times its rows: none leaves the box if it
  // is aligned so.
  for (uint32_t i = 0; i < box.Bytes(); i += 16)
    cta.CheckShared(Place(box, shared, i), 16, 16, access);
}

std::vector<int64_t> CoordinatesOf(Warp& w, const std::vector<Register>& registers, uint32_t lane) {
  std::vector<int64_t> at;
  for (Register r : registers) at.push_back(static_cast<int32_t>(w.Read(r, Mask{1} << lane)[lane]));
  return at;
}

struct Destination {
  Cta* cta;
  uint32_t offset;
  Cta* barrier_cta;
  uint32_t barrier;
};

// global -> shared: the whole box is written, zeros where it is out of bounds, and all its bytes
// complete at the mbarrier.
Execute TensorLoad(Decoder& d, bool cluster_form) {
  if (!d.Take("global")) d.Unknown("a tensor copy from here");
  d.Take("tile");
  if (!d.Take("mbarrier::complete_tx::bytes")) d.Unknown("a load that completes otherwise");
  const bool multicast = d.Take("multicast::cluster");
  const bool pair_first = d.Take("cta_group::2");
  const bool hint = d.Take("L2::cache_hint");
  const bool pair = pair_first || d.Take("cta_group::2");
  if (!cluster_form && (multicast || pair)) d.Unknown("multicast to shared::cta");
  const Address to = d.At(0), barrier = d.At(2);
  const auto [map, coordinates] = d.TensorCoordinates(1);
  size_t next = 3;
  const Register mask = multicast ? d.Source(next++) : 0;
  if (hint) d.Source(next++);  // where the L2 keeps it
  return [=, map = map, coordinates = coordinates](Warp& w, Mask m) {
    if (m & (m - 1))
      Raise("unknown", "a tensor load issued by several lanes at once: each is a copy of its own");
    const uint32_t lane = __builtin_ctz(m);
    Cluster& cluster = w.cta.cluster;
    const Event event = cluster.Start();
    const TensorMap tensor_map = MapAt(w, lane, w.Read(map, m)[lane], event);
    auto box = std::make_shared<Box>(BoxAt(tensor_map, CoordinatesOf(w, coordinates, lane)));
    uint32_t offset, barrier_offset;
    Cta& cta = cluster.At(to.Of(w.Read(to.base, m), lane), &offset, "tensor load");
    Cta& barrier_cta =
        cluster.At(barrier.Of(w.Read(barrier.base, m), lane), &barrier_offset, "tensor load");
    if (!cluster_form && &cta != &w.cta)
      Raise("bounds", "a load to shared::cta memory of another CTA");

    std::vector<Destination> destinations;
    if (multicast) {
      // Data goes to the same offset in every CTA; the signal to the same offset there, or, of a
      // pair, in the CTA whose rank has the parity of the operand's.
      const uint32_t ranks = w.Read(mask, m)[lane] & 0xffff;
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        if (rank >= cluster.ctas.size())
          Raise("bounds", "multicast to CTA ", rank, " of ", cluster.ctas.size());
        const uint32_t signalled = pair ? (rank & ~1u) | (barrier_cta.rank & 1) : rank;
        destinations.push_back(
            {cluster.ctas[rank].get(), offset, cluster.ctas[signalled].get(), barrier_offset});
      }
    } else {
      const bool fits = pair ? barrier_cta.rank / 2 == cta.rank / 2 : &barrier_cta == &cta;
      if (!fits)
        Raise("barrier", "a load to CTA ", cta.rank, " with an mbarrier of CTA ", barrier_cta.rank);
      destinations.push_back({&cta, offset, &barrier_cta, barrier_offset});
    }
    for (const Destination& to : destinations) {
      CheckBox(*to.cta, *box, to.offset, "tensor load");
      CheckInitKnown(w, lane, *to.barrier_cta, to.barrier, "tensor load");
      cluster.Touch(*to.cta, event);
      cluster.Touch(*to.barrier_cta, event);
    }
    w.machine.statistics.counts["copy: bytes loaded"] += box->Bytes();
    w.machine.statistics.counts["copy: loads"] += 1;
    Actor actor{event, w.Now(lane), nullptr};
    actor.async = true;
    cluster.Post(
        Operation::kLoad, kUnordered,
        Text("a tensor load by CTA ", w.cta.rank, " to byte ", offset - kSharedBase),
        [=, &cluster, knowledge = w.KnowledgeOf(lane)] {
          Actor by = actor;
          by.knowledge = knowledge.get();
          Actor reading = by;
          reading.global = true;
          const uint32_t element = box->map.element_bytes;
          std::vector<uint8_t> data(box->Bytes());
          for (size_t r = 0; r < box->rows.size(); ++r) {
            const Row& row = box->rows[r];
            if (!row.inside || box->count == 0) continue;
            const uint64_t from = row.address + box->first * element, bytes = box->count * element;
            cluster.machine.global.Find(from, bytes, "tensor load")
                .Read(from, bytes, &data[r * box->row_bytes + box->first * element], reading);
          }
          for (const Destination& to : destinations) {
            for (uint32_t i = 0; i < data.size(); i += 16) {
              to.cta->WriteShared(Place(*box, to.offset, i), 16, &data[i], by);
            }
            cluster.CompleteTx(*to.barrier_cta, to.barrier, data.size(), event);
          }
        },
        {event.agent});
    w.Tick();
    return Outcome::kNext;
  };
}

// Elements of `data` plus those at `address`.
void AddFloats(Allocation& allocation, uint64_t address, uint8_t* data, uint64_t bytes, Actor by) {
  std::vector<uint8_t> old(bytes);
  allocation.Read(address, bytes, old.data(), by);
  for (uint64_t i = 0; i < bytes; i += 4) {
    float value, sum;
    std::memcpy(&value, data + i, 4);
    std::memcpy(&sum, &old[i], 4);
    sum += value;  // subnormals too, as an H200 does; by the ISA's 9.7.9.25 they would be flushed
    std::memcpy(data + i, &sum, 4);
  }
}

// shared -> global, skipping what is out of bounds; or added to what is there. Issued by a whole
// warp with the same operands it is one store: the instruction is the warp's, and the groups that
// it joins are every lane's. A sum is not taken for one: each lane's would count.
Execute TensorStore(Decoder& d, bool add) {
  if (!add && !d.Take("shared::cta")) d.Unknown("a tensor copy from here");
  d.Take("tile");
  if (!d.Take("bulk_group")) d.Unknown("a store that completes otherwise");
  const bool hint = d.Take("L2::cache_hint");
  const auto [map, coordinates] = d.TensorCoordinates(0);
  const Address from = d.At(1);
  if (hint) d.Source(2);
  return [=, map = map, coordinates = coordinates](Warp& w, Mask m) {
    Cluster& cluster = w.cta.cluster;
    const uint32_t lane = __builtin_ctz(m);
    if (add && (m & (m - 1)) != 0)
      Raise("unknown", "a tensor reduction by several lanes: whether it is one sum or many");
    w.Uniform(map, m, "the map of a tensor store");
    for (Register r : coordinates) w.Uniform(r, m, "a coordinate of a tensor store");
    w.Uniform(from.base, m, "the source of a tensor store");
    auto state = std::make_shared<BulkGroup::State>();
    state->read_event = cluster.Start();
    state->written_event = cluster.Start(true);
    const TensorMap tensor_map = MapAt(w, lane, w.Read(map, m)[lane], state->read_event);
    if (add && tensor_map.type != ElementType::kFloat32)
      Raise("unknown", "a sum of elements that are not float32");
    const std::vector<int64_t> at = CoordinatesOf(w, coordinates, lane);
    for (int64_t c : at) {
      if (c < 0) Raise("bounds", "a tensor store at a negative coordinate, ", c);
    }
    auto box = std::make_shared<Box>(BoxAt(tensor_map, at));
    uint32_t offset;
    Cta& cta = cluster.At(from.Of(w.Read(from.base, m), lane), &offset, "tensor store");
    if (&cta != &w.cta) Raise("bounds", "a store from shared::cta memory of another CTA");
    CheckBox(cta, *box, offset, "tensor store");

    ForLanes(m, [&](uint32_t l) { w.open_group[l].operations.push_back(state); });
    cluster.Touch(cta, state->read_event);
    w.machine.statistics.counts["copy: bytes stored"] += box->Bytes();
    w.machine.statistics.counts["copy: stores"] += 1;
    const std::string what =
        Text("a tensor store by CTA ", cta.rank, " from byte ", offset - kSharedBase);
    cluster.Post(Operation::kStore, kUnordered, what,
                 [=, &cluster, &cta, issuer = w.Now(lane), knowledge = w.KnowledgeOf(lane)] {
                   Actor by{state->read_event, issuer, knowledge.get()};
                   by.async = true;
                   auto data = std::make_shared<std::vector<uint8_t>>(box->Bytes());
                   for (uint32_t i = 0; i < data->size(); i += 16)
                     cta.ReadShared(Place(*box, offset, i), 16, &(*data)[i], by);
                   state->read = true;
                   cluster.Post(Operation::kStore, kUnordered, what + ", writing",
                                [=, &machine = cluster.machine] {
                                  Actor by{state->written_event, issuer, knowledge.get()};
                                  by.async = by.global = true;
                                  const uint32_t element = box->map.element_bytes;
                                  for (size_t r = 0; r < box->rows.size(); ++r) {
                                    const Row& row = box->rows[r];
                                    if (!row.inside || box->count == 0) continue;
                                    const uint64_t to = row.address + box->first * element,
                                                   bytes = box->count * element;
                                    uint8_t* from =
                                        &(*data)[r * box->row_bytes + box->first * element];
                                    Allocation& d = machine.global.Find(to, bytes, "tensor store");
                                    if (add) AddFloats(d, to, from, bytes, by);
                                    d.Write(to, bytes, from, by);
                                  }
                                  state->written = true;
                                },
                                {state->written_event.agent});
                 },
                 {state->read_event.agent, state->written_event.agent});
    w.Tick();
    return Outcome::kNext;
  };
}

INSTRUCTION(Tensor, "cp.async.bulk.tensor", "9.7.9.27.1.2 cp.async.bulk.tensor") {
  const std::string dimensions = d.Next();
  if (dimensions.size() != 2 || dimensions[1] != 'd')
    d.Unknown("a tensor copy of dimension " + dimensions);
  if (d.Take("shared::cluster")) return TensorLoad(d, true);
  if (d.Take("shared::cta")) return TensorLoad(d, false);
  if (d.Take("global")) return TensorStore(d, false);
  d.Unknown("a tensor copy to here");
}

INSTRUCTION(TensorReduce, "cp.reduce.async.bulk.tensor",
            "9.7.9.27.1.3 cp.reduce.async.bulk.tensor") {
  const std::string dimensions = d.Next();
  if (dimensions.size() != 2 || dimensions[1] != 'd')
    d.Unknown("a tensor reduction of dimension " + dimensions);
  if (!d.Take("global")) d.Unknown("a tensor reduction to here");
  if (!d.Take("shared::cta")) d.Unknown("a tensor reduction from here");
  if (!d.Take("add")) d.Unknown("a tensor reduction other than a sum");
  return TensorStore(d, true);
}

INSTRUCTION(CommitGroup, "cp.async.bulk.commit_group", "9.7.9.27.2.1 cp.async.bulk.commit_group") {
  return [](Warp& w, Mask m) {
    ForLanes(m, [&](uint32_t lane) {
      w.bulk_groups[lane].push_back(std::move(w.open_group[lane]));
      w.open_group[lane] = {};
    });
    return Outcome::kNext;
  };
}

// All but the N newest groups are over; with .read, have read their sources.
INSTRUCTION(WaitGroup, "cp.async.bulk.wait_group", "9.7.9.27.2.2 cp.async.bulk.wait_group") {
  const bool read = d.Take("read");
  const size_t n = d.Immediate(0);
  return [=](Warp& w, Mask m) -> Outcome {
    bool over = true;
    ForLanes(m, [&](uint32_t lane) {
      const auto& groups = w.bulk_groups[lane];
      for (size_t i = 0; i + n < groups.size(); ++i) {
        for (const auto& state : groups[i].operations)
          over = over && (read ? state->read : state->written);
      }
    });
    if (!over) return w.Block("bulk groups, all but ", n);
    // Lanes that issued the same stores learn the same.
    auto learn = [&](uint32_t of, Mask lanes) {
      w.Change(lanes, [&](Knowledge& k, Mask) {
        const auto& groups = w.bulk_groups[of];
        for (size_t i = 0; i + n < groups.size(); ++i) {
          for (const auto& state : groups[i].operations) {
            k.all.Add(state->read_event);
            if (!read) k.all.Add(state->written_event);
          }
        }
      });
    };
    std::map<std::vector<const BulkGroup::State*>, Mask> same;
    ForLanes(m, [&](uint32_t lane) {
      const auto& groups = w.bulk_groups[lane];
      std::vector<const BulkGroup::State*> stores;
      for (size_t i = 0; i + n < groups.size(); ++i) {
        for (const auto& state : groups[i].operations) stores.push_back(state.get());
      }
      same[stores] |= Mask{1} << lane;
    });
    for (const auto& [stores, lanes] : same) {
      if (!stores.empty()) learn(__builtin_ctz(lanes), lanes);
    }
    if (!read) {
      ForLanes(m, [&](uint32_t lane) {
        auto& groups = w.bulk_groups[lane];
        if (groups.size() > n) groups.erase(groups.begin(), groups.end() - n);
      });
    }
    return Outcome::kNext;
  };
}

// A hint; the map must be one.
INSTRUCTION(Prefetch, "prefetch.tensormap", "9.7.9.15 prefetch") {
  const Address at = d.At(0);
  return [=](Warp& w, Mask m) {
    const uint64_t* base = w.Read(at.base, m);
    ForLanes(m, [&](uint32_t lane) { MapAt(w, lane, at.Of(base, lane), w.Now(lane)); });
    return Outcome::kNext;
  };
}

INSTRUCTION(ReplaceAddress, "tensormap.replace.tile.global_address.global.b1024.b64",
            "9.7.9.28 tensormap.replace") {
  const Address at = d.At(0);
  const Register value = d.Source(1);
  return [=](Warp& w, Mask m) {
    const uint64_t *base = w.Read(at.base, m), *values = w.Read(value, m);
    ForLanes(m, [&](uint32_t lane) {
      const uint64_t address = at.Of(base, lane);
      Allocation& allocation = w.machine.global.Find(address, kMapBytes, "tensormap.replace");
      allocation.Write(address, 8, &values[lane], w.Generic(lane));  // the map's first field
      allocation.MarkSlots(address, kMapBytes, w.ThreadAgent(lane), true);
    });
    return Outcome::kNext;
  };
}

}  // namespace
}  // namespace model
