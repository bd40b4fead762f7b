// Warpgroup matrix instructions: PTX ISA 9.7.15.
//
// Each warp of a warpgroup runs its quarter, 16 rows, by itself; the four must issue the same
// instructions.

#include <algorithm>

#include "../decode.h"
#include "../floats.h"
#include "../matrix.h"

namespace model {
namespace {

constexpr uint32_t kRows = 16;

INSTRUCTION(Fence, "wgmma.fence.sync.aligned", "9.7.15.7.1 wgmma.fence") {
  return [](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    w.wgmma_fence_at = w.executed + 1;
    return Outcome::kNext;
  };
}

// Row and column, within the warp's rows, of accumulator register j in a lane (9.7.15.5.1.1).
uint32_t RowOf(uint32_t lane, uint32_t j) { return lane / 4 + 8 * (j >> 1 & 1); }
uint32_t ColumnOf(uint32_t lane, uint32_t j) { return 8 * (j >> 2) + 2 * (lane % 4) + (j & 1); }

INSTRUCTION(Mma, "wgmma.mma_async.sync.aligned", "9.7.15.5.2 wgmma.mma_async") {
  const std::string shape = d.Next();
  if (!d.Take("f32") || !d.Take("bf16") || !d.Take("bf16")) d.Unknown("wgmma of these types");
  if (shape.rfind("m64n", 0) != 0 || shape.substr(shape.size() - 3) != "k16")
    d.Unknown("wgmma of shape " + shape);
  const uint32_t n = std::stoul(shape.substr(4));
  const std::vector<Register> accumulators = d.Dests(0);
  if (n % 8 != 0 || n > 256 || accumulators.size() != n / 2) d.Unknown("wgmma of shape " + shape);
  const Register a = d.Source(1), b = d.Source(2), scale_d = d.Source(3);
  if (d.Immediate(4) != 1 || d.Immediate(5) != 1) d.Unknown("wgmma with negated operands");
  const bool a_mn = d.Immediate(6) != 0, b_mn = d.Immediate(7) != 0;
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    if (m != ~Mask{0}) Raise("unknown", "wgmma by a warp with exited threads");
    const uint64_t a_descriptor = w.Uniform(a, m, "a matrix descriptor"),
                   b_descriptor = w.Uniform(b, m, "a matrix descriptor");
    const bool add_d = w.Uniform(scale_d, m, "scale-d") & 1;

    auto& issued = w.cta.wgmma_issued[w.index / 4];
    const uint64_t what = (a_descriptor * 0x9e3779b97f4a7c15 ^ b_descriptor) * 0x9e3779b97f4a7c15 +
                          2 * w.current->pc + add_d;
    if (w.wgmma_sequence == issued.size()) issued.push_back(what);
    if (issued[w.wgmma_sequence++] != what)
      Raise("registers", "the warps of a warpgroup issue different wgmma");

    if (w.wgmma_fence_at == 0) Raise("registers", "wgmma without a wgmma.fence before");
    for (Register r : accumulators) {
      if (add_d && w.defined[r] != ~Mask{0})
        Raise("uninitialized", "accumulator ", w.code.register_names[r], " holds no value");
      if (w.written_at[r] >= w.wgmma_fence_at) {
        Raise("registers", "accumulator ", w.code.register_names[r],
              " was written after the last wgmma.fence");
      }
      w.defined[r] = ~Mask{0};
      w.wgmma_register[r] = w.wgmma_group;
    }
    w.guarded_reads = true;
    const Event event{w.wgmma_agent, ++w.wgmma_clock};
    w.wgmma_last[w.wgmma_group] = w.wgmma_clock;
    w.cta.cluster.Touch(w.cta, event);
    std::vector<SharedKnowledge> knowledge;
    for (const Mind& mind : w.minds) knowledge.push_back(mind.knowledge);
    w.machine.statistics.counts["wgmma"] += 1;
    w.cta.cluster.Post(Operation::kMatrix, event.agent,
                       Text("wgmma of CTA ", w.cta.rank, " warp ", w.index),
                       [=, &w, issuer = w.Now(0), a_matrix = WgmmaMatrix(a_descriptor, a_mn),
                        b_matrix = WgmmaMatrix(b_descriptor, b_mn)] {
                         std::vector<Actor> actors;
                         for (const SharedKnowledge& k : knowledge)
                           actors.push_back({event, issuer, k.get(), true});
                         const std::vector<uint16_t> rows =
                             Fetch(w.cta, a_matrix, w.index % 4 * kRows, kRows, actors);
                         const std::vector<uint16_t> columns = Fetch(w.cta, b_matrix, 0, n, actors);
                         std::vector<float> sums(size_t{kRows} * n);
                         for (uint32_t j = 0; j < accumulators.size(); ++j) {
                           const Lanes& values = w.registers[accumulators[j]];
                           for (uint32_t lane = 0; add_d && lane < kLanes; ++lane) {
                             sums[RowOf(lane, j) * n + ColumnOf(lane, j)] = As<float>(values[lane]);
                           }
                         }
                         MultiplyAdd(rows.data(), kRows, columns.data(), n, sums.data(), add_d);
                         for (uint32_t j = 0; j < accumulators.size(); ++j) {
                           Lanes& values = w.registers[accumulators[j]];
                           for (uint32_t lane = 0; lane < kLanes; ++lane) {
                             values[lane] = Bits(sums[RowOf(lane, j) * n + ColumnOf(lane, j)]);
                           }
                         }
                         w.wgmma_done = event.clock;
                       });
    w.Tick();
    return Outcome::kNext;
  };
}

INSTRUCTION(Commit, "wgmma.commit_group.sync.aligned", "9.7.15.7.2 wgmma.commit_group") {
  return [](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    ++w.wgmma_group;
    return Outcome::kNext;
  };
}

INSTRUCTION(WaitGroup, "wgmma.wait_group.sync.aligned", "9.7.15.7.3 wgmma.wait_group") {
  const uint64_t pending = d.Immediate(0);
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    const uint64_t committed = w.wgmma_group - 1;
    const uint64_t over = committed > pending ? committed - pending : 0;
    auto last = w.wgmma_last.upper_bound(over);
    if (last == w.wgmma_last.begin()) return Outcome::kNext;
    const Clock clock = std::prev(last)->second;
    if (w.wgmma_done < clock) return w.Block("its wgmma groups, all but ", pending);
    w.wgmma_waited = std::max(w.wgmma_waited, over);
    w.Change(m, [&](Knowledge& k, Mask) { k.all.Add({w.wgmma_agent, clock}); });
    w.guarded_reads = w.wgmma_last.rbegin()->first > w.wgmma_waited;
    w.wgmma_last.erase(w.wgmma_last.begin(), std::prev(last));
    return Outcome::kNext;
  };
}

}  // namespace
}  // namespace model
