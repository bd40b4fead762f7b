// mbarriers and fences: PTX ISA 9.7.13.4, 9.7.13.15.

#include "../decode.h"

namespace model {

void CheckInitKnown(Warp& w, uint32_t lane, Cta& cta, uint32_t offset, const char* access) {
  const Event init = cta.BarrierAt(offset, access).init;
  const SharedKnowledge knowledge = w.KnowledgeOf(lane);
  if (init.agent == w.ThreadAgent(lane) || knowledge->all.Has(init) || knowledge->inits.Has(init))
    return;
  Raise("barrier", access, " on the mbarrier at byte ", offset - kSharedBase, " of CTA ", cta.rank,
        ", whose initialization is not ordered before it");
}

namespace {

// .sem and .scope of the default forms. A default scope of .cta is taken for wide enough in a
// cluster, as NVIDIA's own kernels do when they arrive at another CTA's barrier.
void TakeOrder(Decoder& d, const char* semantics) {
  if (d.Take(semantics) && !d.Take("cta") && !d.Take("cluster"))
    d.Unknown("an mbarrier operation of this scope");
}

void TakeShared(Decoder& d, bool* remote) {
  *remote = d.Take("shared::cluster");
  if (!*remote && !d.Take("shared::cta") && !d.Take("shared"))
    d.Unknown("an mbarrier outside shared memory");
  if (!d.Take("b64")) d.Unknown("an mbarrier of this type");
}

Cta& BarrierCta(Warp& w, uint32_t address, bool remote, uint32_t* offset, const char* access) {
  Cta& cta = w.cta.cluster.At(address, offset, access);
  if (!remote && &cta != &w.cta)
    Raise("barrier", access, " names an mbarrier of CTA ", cta.rank, " as its own");
  return cta;
}

INSTRUCTION(Init, "mbarrier.init", "9.7.13.15.9 mbarrier.init") {
  bool remote;
  TakeShared(d, &remote);
  const Address at = d.At(0);
  const Register count = d.Source(1);
  return [=](Warp& w, Mask m) {
    const uint64_t *base = w.Read(at.base, m), *counts = w.Read(count, m);
    ForLanes(m, [&](uint32_t lane) {
      uint32_t offset;
      Cta& cta = BarrierCta(w, at.Of(base, lane), false, &offset, "mbarrier.init");
      cta.CheckShared(offset, 8, 8, "mbarrier.init");
      const uint32_t n = counts[lane];
      if (n < 1 || n >= 1 << 20) Raise("barrier", "mbarrier.init with a count of ", n);
      const uint64_t zero = 0;
      cta.WriteShared(offset, 8, &zero,
                      w.Generic(lane));  // refuses a live mbarrier: it must be invalidated first
      cta.shared_barrier[offset / 4] = cta.shared_barrier[offset / 4 + 1] = 1;
      Mbarrier& barrier = cta.barriers[offset];
      barrier.count = barrier.pending = n;
      barrier.init = w.Now(lane);
      barrier.arriving = barrier.complete = w.cta.cluster.NewKnowledge();
    });
    w.Tick();
    return Outcome::kNext;
  };
}

// Both forms of arrive; expect-tx comes before its arrival.
Execute ArriveOn(Decoder& d, bool expect_tx) {
  TakeOrder(d, "release");
  bool remote;
  TakeShared(d, &remote);
  const Register out = d.Dest(0);
  if (remote && d.Text(0) != "_") d.Unknown("a result of a remote arrive");
  const Address at = d.At(1);
  const Register number = d.Count() > 2 ? d.Source(2) : d.SourceOf("1");
  return [=](Warp& w, Mask m) {
    const uint64_t *base = w.Read(at.base, m), *numbers = w.Read(number, m);
    ForLanes(m, [&](uint32_t lane) {
      uint32_t offset;
      Cta& cta = BarrierCta(w, at.Of(base, lane), remote, &offset, "mbarrier.arrive");
      CheckInitKnown(w, lane, cta, offset, "mbarrier.arrive");
      const uint32_t n = numbers[lane];
      if (expect_tx) {
        Mbarrier& barrier = cta.BarrierAt(offset, "expect-tx");
        barrier.tx += n;
        if (barrier.tx >= 1 << 20) Raise("barrier", "tx-count above its range");
      } else if (n < 1 || n >= 1 << 20) {
        Raise("barrier", "mbarrier.arrive with a count of ", n);
      }
      w.cta.cluster.Arrive(cta, offset, expect_tx ? 1 : n, w.Now(lane),
                           [&](Knowledge& into) { w.Release(Mask{1} << lane, into); });
    });
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t lane) { z[lane] = 0; });
    w.machine.statistics.counts["mbarrier.arrive"] += 1;
    return Outcome::kNext;
  };
}
INSTRUCTION(Arrive, "mbarrier.arrive", "9.7.13.15.13 mbarrier.arrive") {
  return ArriveOn(d, false);
}
INSTRUCTION(ArriveExpectTx, "mbarrier.arrive.expect_tx", "9.7.13.15.13 mbarrier.arrive") {
  return ArriveOn(d, true);
}

// True if the phase of this parity is over: the phase under way has the other. May return false at
// any time before.
INSTRUCTION(TryWait, "mbarrier.try_wait.parity", "9.7.13.15.16 mbarrier.try_wait") {
  TakeOrder(d, "acquire");
  bool remote;
  TakeShared(d, &remote);
  if (remote) d.Unknown("a wait at a remote mbarrier");
  const Register out = d.Dest(0), parity = d.Source(2);
  if (d.Count() > 3) d.Source(3);  // how long it may wait, a hint
  const Address at = d.At(1);
  return [=](Warp& w, Mask m) -> Outcome {
    const uint64_t *base = w.Read(at.base, m), *parities = w.Read(parity, m);
    Mask over = 0;
    uint32_t offset = 0;
    const Mbarrier* pending = nullptr;
    ForLanes(m, [&](uint32_t lane) {
      Cta& cta = BarrierCta(w, at.Of(base, lane), false, &offset, "mbarrier.try_wait");
      if (parities[lane] > 1) Raise("barrier", "mbarrier.try_wait for parity ", parities[lane]);
      const Mbarrier& barrier = cta.BarrierAt(offset, "mbarrier.try_wait");
      CheckInitKnown(w, lane, cta, offset, "mbarrier.try_wait");
      if ((barrier.phases & 1) != parities[lane]) {
        over |= Mask{1} << lane;
      } else {
        pending = &barrier;
      }
    });
    Machine& machine = w.machine;
    if (over == 0 && !machine.give_up_waits) {
      // The first time it returns at once, as if its time were up: the kernel's loop is run too.
      const std::pair<uint32_t, uint64_t> poll{offset, pending->phases};
      if (w.last_poll == poll || machine.options.policy == Policy::kEager) {
        if (!w.current->blocked) machine.statistics.counts["mbarrier waits that did wait"] += 1;
        return w.Block("the mbarrier at byte ", offset - kSharedBase, ", phase ", pending->phases,
                       ": ", pending->pending, " of ", pending->count,
                       " arrivals missing, tx-count ", pending->tx);
      }
      w.last_poll = poll;
    }
    ForLanes(over, [&](uint32_t lane) {
      w.cta.cluster.At(at.Of(base, lane), &offset, "mbarrier.try_wait");
      Mbarrier& barrier = w.cta.barriers[offset];
      barrier.observed = barrier.phases;
    });
    // Lanes that wait for the same barrier learn the same.
    Mask left = over;
    while (left != 0) {
      const uint32_t first = __builtin_ctz(left);
      Mask same = 0;
      ForLanes(left, [&](uint32_t lane) {
        same |= Mask{at.Of(base, lane) == at.Of(base, first)} << lane;
      });
      w.cta.cluster.At(at.Of(base, first), &offset, "mbarrier.try_wait");
      w.Acquire(same, w.cta.barriers[offset].complete);
      left &= ~same;
    }
    uint64_t* p = w.Write(out, m);
    ForLanes(m, [&](uint32_t lane) { p[lane] = over >> lane & 1; });
    machine.statistics.counts["mbarrier waits"] += 1;
    return Outcome::kNext;
  };
}

// What a thread knows, and did, may from now on be relied on by asynchronous operations that are
// ordered after the fence.
INSTRUCTION(FenceProxyAsync, "fence.proxy.async", "9.7.13.4 membar, fence; 8.9.5 causality order") {
  const bool shared_only = d.Take("shared::cta") || d.Take("shared::cluster");
  const bool global_only = !shared_only && d.Take("global");
  return [=](Warp& w, Mask m) {
    auto fence = [&](Clocks& fenced, const Knowledge& k, Mask lanes) {
      fenced.Join(k.all);
      ForLanes(lanes, [&](uint32_t lane) { fenced.Add(w.Now(lane)); });
    };
    w.Change(m, [&](Knowledge& k, Mask lanes) {
      if (!global_only) fence(k.fenced, k, lanes);
      if (!shared_only) fence(k.fenced_global, k, lanes);
    });
    w.Tick();
    return Outcome::kNext;
  };
}

INSTRUCTION(FenceInit, "fence.mbarrier_init.release.cluster", "9.7.13.4 membar, fence") {
  return [](Warp& w, Mask m) {
    ForLanes(m, [&](uint32_t lane) { w.fenced_inits[lane] = w.Now(lane); });
    w.Tick();
    return Outcome::kNext;
  };
}

// The scope is taken for wide enough: .gpu, where one device wrote the map.
void TakeScope(Decoder& d) {
  if (!d.Take("gpu") && !d.Take("sys")) d.Unknown("a tensormap fence of this scope");
}

INSTRUCTION(FenceMapRelease, "fence.proxy.tensormap::generic.release", "9.7.13.4 membar, fence") {
  TakeScope(d);
  return [](Warp& w, Mask m) {
    for (auto& [base, allocation] : w.machine.global.allocations()) {
      for (auto& [offset, slot] : allocation.slots) {
        ForLanes(m, [&, &slot = slot](uint32_t lane) {
          if (slot.released || slot.writer != w.ThreadAgent(lane)) return;
          slot.released = true;
          slot.release = w.Now(lane);
        });
      }
    }
    w.Tick();
    return Outcome::kNext;
  };
}

INSTRUCTION(FenceMapAcquire, "fence.proxy.tensormap::generic.acquire", "9.7.13.4 membar, fence") {
  TakeScope(d);
  const Address at = d.At(0);
  if (d.Immediate(1) != 128) d.Unknown("a tensormap fence of this size");
  return [=](Warp& w, Mask m) {
    const uint64_t* base = w.Read(at.base, m);
    ForLanes(m, [&](uint32_t lane) {
      const uint64_t address = at.Of(base, lane);
      const Allocation& allocation = w.machine.global.Find(address, 128, "tensormap fence");
      bool released = true;  // else there is nothing to acquire yet
      const uint64_t version = allocation.MapVersion(address, &released, w.Generic(lane));
      if (released) w.cta.acquired_maps[address].push_back({w.Now(lane), version});
    });
    w.Tick();
    return Outcome::kNext;
  };
}

}  // namespace
}  // namespace model
