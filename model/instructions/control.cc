// Control flow, warp-wide instructions, barriers of a CTA and of a cluster: PTX
// ISA 9.7.12, 9.7.13, 9.7.19.

#include "../decode.h"

namespace model {
namespace {

INSTRUCTION(Bra, "bra", "9.7.12.2 bra") {
  // A promise of the compiler's that the lanes agree. It does not hold in the kernels' wait loops,
  // where lanes that ask an mbarrier at different times may get different answers.
  d.Take("uni");
  const uint32_t target = d.Target(0);
  return [=](Warp& w, Mask m) { return w.Branch(m, target); };
}

INSTRUCTION(Ret, "ret", "9.7.12.6 ret: of a kernel, its end") {
  return [](Warp&, Mask) { return Outcome::kExited; };
}
INSTRUCTION(Exit, "exit", "9.7.12.7 exit") {
  return [](Warp&, Mask) { return Outcome::kExited; };
}

// Launches do not overlap here: what a grid depends on is over, and all that it wrote visible,
// before it starts.
INSTRUCTION(GridDependencyWait, "griddepcontrol.wait", "9.7.13.13 griddepcontrol") {
  return [](Warp&, Mask) { return Outcome::kNext; };
}
INSTRUCTION(GridDependencyLaunch, "griddepcontrol.launch_dependents", "9.7.13.13 griddepcontrol") {
  return [](Warp&, Mask) { return Outcome::kNext; };
}

// A collective of a warp: its body runs when all threads that the mask names are here. Only whole
// warps are modelled.
template <typename F>
Execute WholeWarp(Decoder& d, const std::string& mask, F body) {
  if (mask != "-1" && mask != "0xffffffff") d.Unknown("membermask " + mask);
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    body(w, m);
    return Outcome::kNext;
  };
}

INSTRUCTION(BarWarpSync, "bar.warp.sync", "9.7.13.2 bar.warp.sync") {
  return WholeWarp(d, d.Text(0), [](Warp& w, Mask m) { w.Meet(m); });
}

// Orders no memory. A lane that reads one outside the mask gets no defined value.
INSTRUCTION(Shfl, "shfl.sync", "9.7.9.6 shfl.sync") {
  const std::string mode = d.Next();
  if (mode != "idx" && mode != "up" && mode != "down" && mode != "bfly")
    d.Unknown("shfl.sync." + mode);
  if (!d.Take("b32")) d.Unknown("shfl.sync of this type");
  const auto [out, found] = d.DestPair(0);
  const Register a = d.Source(1), b = d.Source(2), c = d.Source(3);
  return WholeWarp(d, d.Text(4), [=](Warp& w, Mask m) {
    Lanes value;
    const uint64_t *x = w.Read(a, 0), *by = w.Read(b, m), *clamp = w.Read(c, m);
    Mask valid = 0, in_range = 0;
    ForLanes(m, [&](uint32_t lane) {
      const uint32_t segment = clamp[lane] >> 8 & 31, bound = clamp[lane] & 31, n = by[lane] & 31;
      const uint32_t max_lane = (lane & segment) | (bound & ~segment & 31),
                     min_lane = lane & segment;
      uint32_t from = 0;
      bool in = false;
      if (mode == "up") {
        from = lane - n;
        in = static_cast<int32_t>(from) >= static_cast<int32_t>(max_lane);
      } else if (mode == "idx") {
        from = min_lane | (n & ~segment & 31);
        in = from <= max_lane;
      } else {
        from = mode == "down" ? lane + n : lane ^ n;
        in = from <= max_lane;
      }
      if (!in) from = lane;
      in_range |= Mask{in} << lane;
      value[lane] = x[from];
      if (m >> from & 1) {
        w.Read(a, Mask{1} << from);
        valid |= Mask{1} << lane;
      }
    });
    uint64_t* z = w.Write(out, valid);
    w.defined[out] &= ~(m & ~valid);
    ForLanes(valid, [&](uint32_t lane) { z[lane] = value[lane]; });
    uint64_t* p = w.Write(found, m);
    ForLanes(m, [&](uint32_t lane) { p[lane] = in_range >> lane & 1; });
  });
}

INSTRUCTION(Vote, "vote.sync.ballot.b32", "9.7.13.9 vote.sync") {
  const Register out = d.Dest(0), p = d.Source(1);
  return WholeWarp(d, d.Text(2), [=](Warp& w, Mask m) {
    const uint64_t* x = w.Read(p, m);
    uint64_t ballot = 0;
    ForLanes(m, [&](uint32_t lane) { ballot |= (x[lane] & 1) << lane; });
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t lane) { z[lane] = ballot; });
  });
}

INSTRUCTION(Elect, "elect.sync", "9.7.13.14 elect.sync") {
  const auto [out, elected] = d.DestPair(0);
  return WholeWarp(d, d.Text(1), [out = out, elected = elected](Warp& w, Mask m) {
    const uint32_t leader = m >> w.machine.leader & 1 ? w.machine.leader : __builtin_ctz(m);
    uint64_t *z = w.Write(out, m), *p = w.Write(elected, m);
    ForLanes(m, [&](uint32_t lane) {
      z[lane] = leader;
      p[lane] = lane == leader;
    });
  });
}

// A warp arrives with all its threads; one that waits goes on when all have come that are expected.
// An arrival synchronizes with the waits that it completes (8.9.4).
Execute AtNamedBarrier(Decoder& d, bool waits) {
  const char* const what = waits ? "bar.sync" : "bar.arrive";
  const Register id = d.Source(0);
  const bool counted = d.Count() > 1;
  if (!waits && !counted) d.Unknown("bar.arrive without a thread count");
  const Register count = counted ? d.Source(1) : 0;
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    const uint32_t number = w.Uniform(id, m, "a named barrier");
    const uint32_t threads = counted ? static_cast<uint32_t>(w.Uniform(count, m, "a thread count"))
                                     : static_cast<uint32_t>(w.cta.warps.size() * kLanes);
    NamedBarrier& barrier = w.cta.named_barriers[number];
    if (!w.current->arrived) {
      if (number > 15) Raise("barrier", "named barrier ", number, " of 16");
      if (threads == 0 || threads % kLanes != 0)
        Raise("barrier", what, " of ", threads, " threads");
      if (barrier.arrived == 0) {
        barrier.expected = threads;
        barrier.arriving = std::make_shared<Knowledge>(w.cta.cluster.NewKnowledge());
      } else if (barrier.expected != threads) {
        Raise("barrier", what, " ", number, " with ", threads, " threads, where others wait for ",
              barrier.expected);
      }
      w.Release(m, *barrier.arriving);
      w.current->met = barrier.arriving;
      barrier.arrived += kLanes;
      w.current->arrived = true;
      w.current->ticket = barrier.generation;
      if (barrier.arrived > barrier.expected)
        Raise("barrier", what, " ", number, ": more warps than it waits for");
      if (barrier.arrived == barrier.expected) {
        ++barrier.generation;
        barrier.arrived = 0;
        ++w.machine.progress;
      }
    }
    if (!waits) return Outcome::kNext;
    if (barrier.generation == w.current->ticket) {
      return w.Block("bar.sync ", number, ", where ", barrier.arrived, " of ", barrier.expected,
                     " threads are");
    }
    w.Acquire(m, *w.current->met);
    w.current->met = nullptr;
    w.Meet(m);
    return Outcome::kNext;
  };
}
INSTRUCTION(BarSync, "bar.sync", "9.7.13.1 bar, barrier") { return AtNamedBarrier(d, true); }
INSTRUCTION(BarArrive, "bar.arrive", "9.7.13.1 bar, barrier") { return AtNamedBarrier(d, false); }

INSTRUCTION(ClusterArrive, "barrier.cluster.arrive", "9.7.13.3 barrier.cluster") {
  const bool relaxed = d.Take("relaxed");
  if (!relaxed) d.Take("release");
  const bool aligned = d.Take("aligned");
  return [=](Warp& w, Mask m) -> Outcome {
    if (aligned && !w.Converged(m)) return w.Block("the other lanes of its warp");
    Cluster& cluster = w.cta.cluster;
    if (w.cluster_arrived & m) Raise("barrier", "a thread arrives twice at the cluster's barrier");
    if (relaxed) {
      // Passes on only what fence.mbarrier_init was executed for.
      ForLanes(m, [&](uint32_t lane) {
        if (w.fenced_inits[lane].agent != 0)
          cluster.barrier_arriving.inits.Add(w.fenced_inits[lane]);
      });
    } else {
      w.Release(m, cluster.barrier_arriving);
    }
    w.cluster_arrived |= m;
    w.cluster_waits |= m;
    w.cluster_generation = cluster.barrier_generation;
    cluster.SettleBarrier();
    return Outcome::kNext;
  };
}

INSTRUCTION(ClusterWait, "barrier.cluster.wait", "9.7.13.3 barrier.cluster") {
  d.Take("acquire");
  const bool aligned = d.Take("aligned");
  return [=](Warp& w, Mask m) -> Outcome {
    if (aligned && !w.Converged(m)) return w.Block("the other lanes of its warp");
    if (m & ~w.cluster_waits) Raise("barrier", "barrier.cluster.wait without an arrive");
    Cluster& cluster = w.cta.cluster;
    cluster.SettleBarrier();  // others may have exited
    if (cluster.barrier_generation == w.cluster_generation) return w.Block("the cluster's barrier");
    w.Acquire(m, cluster.barrier_complete);
    w.cluster_waits &= ~m;
    return Outcome::kNext;
  };
}

// The registers of a CTA are one pool; every warp of a warpgroup executes it.
template <int kSign>
Execute SetMaxRegisters(Decoder& d) {
  const int64_t wanted = d.Immediate(0);
  if (wanted < 24 || wanted > 256 || wanted % 8 != 0) d.Unknown("setmaxnreg to " + d.Text(0));
  return [=](Warp& w, Mask m) -> Outcome {
    if (!w.Converged(m)) return w.Block("the other lanes of its warp");
    const int64_t more = (wanted - w.max_registers) * kLanes;
    if (more * kSign < 0)
      Raise("registers", "setmaxnreg from ", w.max_registers, " to ", wanted,
            " goes the wrong way");
    if (more > w.cta.free_registers) {
      return w.Block("registers: ", more, " wanted, ", w.cta.free_registers, " free in its CTA");
    }
    w.cta.free_registers -= more;
    w.max_registers = wanted;
    ++w.register_claims;
    ++w.machine.progress;
    return Outcome::kNext;
  };
}
INSTRUCTION(IncRegisters, "setmaxnreg.inc.sync.aligned.u32", "9.7.19.5 setmaxnreg") {
  return SetMaxRegisters<1>(d);
}
INSTRUCTION(DecRegisters, "setmaxnreg.dec.sync.aligned.u32", "9.7.19.5 setmaxnreg") {
  return SetMaxRegisters<-1>(d);
}

}  // namespace
}  // namespace model
