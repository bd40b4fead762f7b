// Blackwell's tensor cores and tensor memory: PTX ISA 9.7.16. Never compared with the hardware.

#include <algorithm>

#include "../decode.h"
#include "../floats.h"
#include "../matrix.h"

namespace model {
namespace {

// cta_group::1 or ::2, the same in a whole kernel (9.7.16.7.1).
uint32_t CtaGroup(Decoder& d) {
  const uint32_t group = d.Take("cta_group::1") ? 1 : d.Take("cta_group::2") ? 2 : 0;
  if (group == 0) d.Unknown("tcgen05 without a cta_group");
  d.SameCtaGroup(group);
  return group;
}

size_t Cell(uint32_t lane, uint32_t column) { return size_t{lane} * kTensorColumns + column; }

void CheckAllocated(const Cta& cta, uint32_t column, uint32_t columns, const char* access) {
  auto after = cta.tensor_allocations.upper_bound(column);
  if (after != cta.tensor_allocations.begin()) {
    const auto& [first, count] = *std::prev(after);
    if (column + columns <= first + count) return;
  }
  Raise("tensor_memory", access, " of columns ", column, " to ", column + columns - 1, " of CTA ",
        cta.rank, ", which are not allocated");
}

// Of a pair, the n-th alloc, or dealloc, of one CTA goes on when the other's has begun.
bool PairIsHere(Warp& w, bool dealloc) {
  auto& begun = w.cta.cluster.pair_collectives[{w.cta.rank / 2, dealloc}];
  if (!w.current->arrived) {
    w.current->arrived = true;
    w.current->ticket = ++begun[w.cta.rank % 2];
    ++w.machine.progress;
  }
  return begun[1 - w.cta.rank % 2] >= w.current->ticket;
}

uint32_t ColumnCount(Warp& w, Register columns, Mask m) {
  const uint32_t n = w.Uniform(columns, m, "the columns of tensor memory");
  if (n < 32 || n > kTensorColumns || (n & (n - 1)))
    Raise("tensor_memory", n, " columns of tensor memory");
  return n;
}

INSTRUCTION(Alloc, "tcgen05.alloc", "9.7.16.7.1 tcgen05.alloc, dealloc, relinquish_alloc_permit") {
  const uint32_t group = CtaGroup(d);
  if (!d.Take("sync") || !d.Take("aligned") || !d.Take("shared::cta") || !d.Take("b32"))
    d.Unknown("tcgen05.alloc of this form");
  const Address at = d.At(0);
  const Register columns = d.Source(1);
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    const uint32_t n = ColumnCount(w, columns, m);
    Cta& cta = w.cta;
    if (!cta.tensor_permit) Raise("tensor_memory", "tcgen05.alloc after relinquish_alloc_permit");
    if (n > cta.tensor_columns_max)
      Raise("tensor_memory", "tcgen05.alloc of more columns than the one before");
    if (group == 2 && !PairIsHere(w, false))
      return w.Block("tcgen05.alloc of the other CTA of its pair");
    uint32_t first = 0;
    for (const auto& [column, count] : cta.tensor_allocations) {
      if (first + n > column) first = column + count;
    }
    if (first + n > kTensorColumns) return w.Block("columns of tensor memory: ", n, " wanted");
    cta.tensor_allocations[first] = n;
    cta.tensor_columns_max = n;
    uint32_t offset;
    const uint32_t lane = __builtin_ctz(m);
    Cta& to = w.cta.cluster.At(w.Uniform(at.base, m, "where tcgen05.alloc writes") + at.offset,
                               &offset, "tcgen05.alloc");
    if (&to != &cta) Raise("bounds", "tcgen05.alloc writes to another CTA");
    cta.WriteShared(offset, 4, &first, w.Generic(lane));
    w.machine.statistics.counts["tcgen05.alloc"] += 1;
    return Outcome::kNext;
  };
}

INSTRUCTION(Dealloc, "tcgen05.dealloc",
            "9.7.16.7.1 tcgen05.alloc, dealloc, relinquish_alloc_permit") {
  const uint32_t group = CtaGroup(d);
  if (!d.Take("sync") || !d.Take("aligned") || !d.Take("b32"))
    d.Unknown("tcgen05.dealloc of this form");
  const Register at = d.Source(0), columns = d.Source(1);
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    const uint32_t n = ColumnCount(w, columns, m);
    const uint32_t first = w.Uniform(at, m, "an address of tensor memory") & 0xffff;
    if (group == 2 && !PairIsHere(w, true))
      return w.Block("tcgen05.dealloc of the other CTA of its pair");
    auto found = w.cta.tensor_allocations.find(first);
    if (found == w.cta.tensor_allocations.end() || found->second != n) {
      Raise("tensor_memory", "tcgen05.dealloc of ", n, " columns at ", first,
            ", which were not allocated so");
    }
    for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
      w.cta.tensor_shadow.CheckFollowsAll(Cell(lane, first), n, w.Generic(__builtin_ctz(m)));
      std::fill_n(w.cta.tensor_written.begin() + Cell(lane, first), n, 0);
    }
    w.cta.tensor_allocations.erase(found);
    ++w.machine.progress;
    return Outcome::kNext;
  };
}

INSTRUCTION(Relinquish, "tcgen05.relinquish_alloc_permit",
            "9.7.16.7.1 tcgen05.alloc, dealloc, relinquish_alloc_permit") {
  CtaGroup(d);
  if (!d.Take("sync") || !d.Take("aligned"))
    d.Unknown("tcgen05.relinquish_alloc_permit of this form");
  return [](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    w.cta.tensor_permit = false;
    return Outcome::kNext;
  };
}

// The instruction descriptor (9.7.16.4.2) of kind::f16.
struct Shape {
  uint32_t m, n;
  bool a_mn, b_mn;
};

Shape ShapeOf(uint32_t descriptor, uint32_t group) {
  auto field = [&](int bit, int bits) { return descriptor >> bit & ((1u << bits) - 1); };
  constexpr uint32_t kFloat32 = 1, kBfloat16 = 1;
  if (field(4, 2) != kFloat32 || field(7, 3) != kBfloat16 || field(10, 3) != kBfloat16) {
    Raise("unknown", "tcgen05.mma of these types");
  }
  if (field(0, 4) || field(6, 1) || field(13, 2) || field(23, 1) || field(29, 3)) {
    Raise("unknown", "an instruction descriptor of 0x", std::hex, descriptor);
  }
  const Shape shape{field(24, 5) << 4, field(17, 6) << 3, field(15, 1) != 0, field(16, 1) != 0};
  if (shape.m != 128 * group) Raise("unknown", "tcgen05.mma of ", shape.m, " rows");
  if (shape.n < 16 || shape.n > 256 || shape.n % 16 != 0)
    Raise("unknown", "tcgen05.mma of ", shape.n, " columns");
  return shape;
}

uint32_t OneLane(Mask m, const char* what) {
  if (m & (m - 1))
    Raise("unknown", what, " issued by several lanes at once: each is an operation of its own");
  return __builtin_ctz(m);
}

// Whether the thread knows that all tcgen05.mma of other threads of its CTA are done.
bool OthersAreDone(const Warp& w, uint32_t lane) {
  const Cta& cta = w.cta;
  return cta.tensor_issuer == 0 || cta.tensor_issuer == w.ThreadAgent(lane) ||
         w.KnowledgeOf(lane)->all.Has(cta.tensor_last);
}

// One thread issues. Of a pair, that of the even CTA: each CTA brings half of A's rows and half of
// B's; its 128 rows of the result, of all columns, go to its own tensor memory.
INSTRUCTION(Mma, "tcgen05.mma", "9.7.16.10.9.1 tcgen05.mma; layouts 9.7.16.10.5") {
  const uint32_t group = CtaGroup(d);
  if (!d.Take("kind::f16")) d.Unknown("tcgen05.mma of this kind");
  d.Take("collector::a::discard");  // what A's buffer may keep: never needed
  if (d.Text(1)[0] == '[') d.Unknown("A in tensor memory");
  const Address to = d.At(0);
  const Register a = d.Source(1), b = d.Source(2), descriptor = d.Source(3), add = d.Source(5);
  const std::vector<Register> disabled = d.Sources(4);
  if (disabled.size() != 4 * group) d.Unknown("a mask of this size");
  return [=](Warp& w, Mask m) {
    const uint32_t lane = OneLane(m, "tcgen05.mma");
    auto value = [&](Register r) { return w.Read(r, m)[lane]; };
    for (Register r : disabled) {
      if (static_cast<uint32_t>(value(r)) != 0)
        Raise("unknown", "tcgen05.mma with disabled output lanes");
    }
    const Shape shape = ShapeOf(value(descriptor), group);
    const SharedMatrix a_matrix = Tcgen05Matrix(value(a), shape.a_mn),
                       b_matrix = Tcgen05Matrix(value(b), shape.b_mn);
    const bool add_d = value(add) & 1;
    const uint32_t address = to.Of(w.Read(to.base, m), lane);
    if (address >> 16 != 0) Raise("tensor_memory", "tcgen05.mma to lane ", address >> 16);
    if (group == 2 && w.cta.rank % 2 != 0)
      Raise("unknown", "tcgen05.mma of a pair issued by its odd CTA");
    // It could go on where another thread's fences put it after that one's (9.7.16.6.4.3).
    if (!OthersAreDone(w, lane)) {
      Raise("unknown", "tcgen05.mma while those of another thread of its CTA may be under way");
    }
    std::vector<Cta*> ctas;
    const Event event{w.cta.tensor_agent, ++w.cta.tensor_clock};
    w.cta.tensor_last = event;
    w.cta.tensor_issuer = w.ThreadAgent(lane);
    for (uint32_t i = 0; i < group; ++i) {
      ctas.push_back(w.cta.cluster.ctas[w.cta.rank + i].get());
      w.cta.cluster.Touch(*ctas.back(), event);
    }
    w.machine.statistics.counts["tcgen05.mma"] += 1;
    w.cta.cluster.Post(
        Operation::kMatrix, event.agent, Text("tcgen05.mma of CTA ", w.cta.rank),
        [=, issuer = w.Now(lane), knowledge = w.KnowledgeOf(lane)] {
          Actor by{event, issuer, knowledge.get(), true};
          std::vector<uint16_t> rows, columns;
          for (Cta* cta : ctas) {
            if (cta->exited)
              Raise("bounds", "tcgen05.mma on CTA ", cta->rank, ", which has exited");
            const std::vector<uint16_t> r = Fetch(*cta, a_matrix, 0, shape.m / group, {by});
            const std::vector<uint16_t> c = Fetch(*cta, b_matrix, 0, shape.n / group, {by});
            rows.insert(rows.end(), r.begin(), r.end());
            columns.insert(columns.end(), c.begin(), c.end());
          }
          by.async = false;
          by.tcgen05 = true;
          const uint32_t column = address & 0xffff;
          for (uint32_t i = 0; i < group; ++i) {
            Cta& cta = *ctas[i];
            CheckAllocated(cta, column, shape.n, "tcgen05.mma");
            std::vector<float> sums(size_t{kTensorLanes} * shape.n);
            for (uint32_t row = 0; row < kTensorLanes; ++row) {
              const size_t cell = Cell(row, column);
              cta.tensor_shadow.Write(cell, shape.n, by);
              for (uint32_t j = 0; j < shape.n; ++j) {
                if (add_d && !cta.tensor_written[cell + j]) {
                  Raise("uninitialized", "tcgen05.mma adds to lane ", row, ", column ", column + j,
                        ", never written");
                }
                sums[row * shape.n + j] = FloatOfBits(cta.tensor[cell + j]);
              }
            }
            MultiplyAdd(&rows[i * kTensorLanes * kK], kTensorLanes, columns.data(), shape.n,
                        sums.data(), add_d);
            for (uint32_t row = 0; row < kTensorLanes; ++row) {
              for (uint32_t j = 0; j < shape.n; ++j) {
                cta.tensor[Cell(row, column) + j] = BitsOfFloat(sums[row * shape.n + j]);
              }
              std::fill_n(cta.tensor_written.begin() + Cell(row, column), shape.n, 1);
            }
          }
        });
    w.Tick();
    return Outcome::kNext;
  };
}

// Arrives once, when all that the thread issued before is done; fence::before_thread_sync is
// implied (9.7.16.6.4). These operations follow all that the thread did before (8.9.1.1), and so
// does who sees them done: that a copy has filled the stage that they read, another CTA's thread
// learns only this way.
INSTRUCTION(Commit, "tcgen05.commit", "9.7.16.12.1 tcgen05.commit") {
  CtaGroup(d);
  if (!d.Take("mbarrier::arrive::one") || !d.Take("shared::cluster"))
    d.Unknown("tcgen05.commit of this form");
  const bool multicast = d.Take("multicast::cluster");
  if (!d.Take("b64")) d.Unknown("tcgen05.commit of this form");
  const Address at = d.At(0);
  const Register mask = multicast ? d.Source(1) : 0;
  return [=](Warp& w, Mask m) {
    const uint32_t lane = OneLane(m, "tcgen05.commit");
    Cluster& cluster = w.cta.cluster;
    uint32_t offset;
    Cta& named = cluster.At(at.Of(w.Read(at.base, m), lane), &offset, "tcgen05.commit");
    std::vector<Cta*> targets{&named};
    if (multicast) {
      targets.clear();
      const uint32_t ranks = w.Read(mask, m)[lane] & 0xffff;
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        if (rank >= cluster.ctas.size())
          Raise("bounds", "tcgen05.commit to CTA ", rank, " of ", cluster.ctas.size());
        targets.push_back(cluster.ctas[rank].get());
      }
    }
    // It waits for what its own thread issued.
    if (!OthersAreDone(w, lane)) {
      Raise("race",
            "tcgen05.commit, while tcgen05.mma of another thread may be under way, for which "
            "it does not wait");
    }
    const Event event{w.cta.tensor_agent, ++w.cta.tensor_clock};
    for (Cta* target : targets) {
      CheckInitKnown(w, lane, *target, offset, "tcgen05.commit");
      cluster.Touch(*target, event);
    }
    cluster.Post(Operation::kMatrix, event.agent, Text("tcgen05.commit of CTA ", w.cta.rank),
                 [=, &cluster, issuer = w.Now(lane), knowledge = w.KnowledgeOf(lane)] {
                   for (Cta* target : targets) {
                     cluster.Arrive(*target, offset, 1, event, [&](Knowledge& into) {
                       into.all.Join(knowledge->all);
                       into.all.Add(issuer);
                       into.all.Add(event);
                     });
                   }
                 });
    w.Tick();
    return Outcome::kNext;
  };
}

// Where a register of a thread comes from: lane of tensor memory and column, from the address on.
using Source = std::pair<uint32_t, uint32_t> (*)(uint32_t thread, uint32_t i);

// Warp w reads lanes 32 (w % 4) and on. The results may be used at once: a register dependency is
// kept (9.7.16.6.4.5). Others learn that the load is over only by wait::ld and
// fence::before_thread_sync.
Execute LoadFrom(Decoder& d, uint32_t lanes, uint32_t registers, Source source) {
  const std::string repetitions = d.Next();
  if (!d.Take("b32")) d.Unknown("tcgen05.ld of this form");
  const std::vector<Register> out = d.Dests(0);
  if (repetitions != "x" + std::to_string(out.size() / registers) || out.size() % registers != 0) {
    d.Unknown("tcgen05.ld of this size");
  }
  const Address at = d.At(1);
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    if (m != ~Mask{0}) Raise("unknown", "tcgen05.ld by a warp with exited threads");
    const uint32_t address = w.Uniform(at.base, m, "an address of tensor memory") + at.offset;
    const uint32_t first_lane = address >> 16, column = address & 0xffff, n = out.size();
    if (first_lane / 32 != w.index % 4 || first_lane % lanes != 0) {
      Raise("tensor_memory", "warp ", w.index, " may not read tensor memory from lane ",
            first_lane);
    }
    CheckAllocated(w.cta, column, n * kLanes / lanes, "tcgen05.ld");
    ++w.tensor_load_clock;
    for (uint32_t thread = 0; thread < kLanes; ++thread) {
      const SharedKnowledge knowledge = w.KnowledgeOf(thread);
      Actor by{{w.tensor_load_agent + thread, w.tensor_load_clock}, w.Now(thread), knowledge.get()};
      by.tcgen05 = true;
      for (uint32_t i = 0; i < n; ++i) {
        const auto [row, offset] = source(thread, i);
        const size_t cell = Cell(first_lane + row, column + offset);
        w.cta.tensor_shadow.Read(cell, 1, by);
        if (!w.cta.tensor_written[cell]) {
          Raise("uninitialized", "tcgen05.ld of lane ", first_lane + row, ", column ",
                column + offset, ", never written");
        }
      }
    }
    for (uint32_t i = 0; i < n; ++i) {
      uint64_t* z = w.Write(out[i], m);
      for (uint32_t thread = 0; thread < kLanes; ++thread) {
        const auto [row, offset] = source(thread, i);
        z[thread] = w.cta.tensor[Cell(first_lane + row, column + offset)];
      }
    }
    w.machine.statistics.counts["tcgen05.ld"] += 1;
    return Outcome::kNext;
  };
}

INSTRUCTION(Load32x32b, "tcgen05.ld.sync.aligned.32x32b",
            "9.7.16.8.3 tcgen05.ld; access restrictions 9.7.16.8.1") {
  return LoadFrom(d, 32, 1, [](uint32_t thread, uint32_t i) { return std::pair{thread, i}; });
}

// As accumulators of wgmma lie, each row of four threads with 8 columns.
INSTRUCTION(Load16x256b, "tcgen05.ld.sync.aligned.16x256b",
            "9.7.16.8.3 tcgen05.ld; 9.7.16.2.3 matrix fragments of .16x256b") {
  return LoadFrom(d, 16, 4, [](uint32_t thread, uint32_t i) {
    return std::pair{thread / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
  });
}

INSTRUCTION(WaitLoad, "tcgen05.wait::ld.sync.aligned", "9.7.16.8.5 tcgen05.wait") {
  return [](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    w.tensor_load_waited = w.tensor_load_clock;
    return Outcome::kNext;
  };
}

INSTRUCTION(FenceBefore, "tcgen05.fence::before_thread_sync", "9.7.16.11 tcgen05.fence") {
  return [](Warp& w, Mask m) {
    ForLanes(m, [&](uint32_t lane) { w.tensor_load_fenced[lane] = w.tensor_load_waited; });
    return Outcome::kNext;
  };
}

INSTRUCTION(FenceAfter, "tcgen05.fence::after_thread_sync", "9.7.16.11 tcgen05.fence") {
  return [](Warp& w, Mask m) {
    w.Change(m, [](Knowledge& k, Mask) { k.tcgen05.Join(k.all); });
    return Outcome::kNext;
  };
}

}  // namespace
}  // namespace model
