// Happens-before: who did what, and who may know of it.
//
// An agent is whatever acts in an order of its own: every thread, and every engine that works on
// its own (a copy under way, a warp's wgmma pipe, a CTA's tensor pipe, a warp's loads from tensor
// memory). An agent's actions carry its clock; (agent, clock) is an event. Knowledge says, for each
// agent of a cluster, up to which clock its events have happened before what one does next. Agents
// of different clusters never know of each other.

#ifndef MODEL_ORDER_H_
#define MODEL_ORDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace model {

using Agent = uint32_t;  // cluster in the upper half, index within it in the lower; 0: nobody
using Clock = uint32_t;

struct Event {
  Agent agent = 0;
  Clock clock = 0;
};

// Which agents a cluster has: 0 nobody, then its threads, then per CTA the tensor pipe and per warp
// its wgmma pipe, or from SM100 on every lane's loads from tensor memory, then slots for operations
// that are ordered with nothing.
struct Agents {
  uint32_t ctas = 1, threads = 32;  // threads: of a CTA
  bool tensor_loads = false;        // SM100
  static constexpr uint32_t kLanes = 32;
  static constexpr uint32_t kSlots = 192;  // per CTA: several times what is ever under way

  uint32_t Warps() const { return (threads + kLanes - 1) / kLanes; }
  uint32_t OfWarp() const { return tensor_loads ? kLanes : 1; }
  uint32_t OfCta() const { return 1 + Warps() * OfWarp(); }

  uint32_t Thread(uint32_t cta, uint32_t thread) const { return 1 + cta * threads + thread; }
  uint32_t TensorPipe(uint32_t cta) const { return Thread(ctas, 0) + cta * OfCta(); }
  uint32_t WarpEngine(uint32_t cta, uint32_t warp) const {
    return TensorPipe(cta) + 1 + warp * OfWarp();
  }
  uint32_t Slot(uint32_t slot) const { return TensorPipe(ctas) + slot; }
  uint32_t Count() const { return Slot(ctas * kSlots); }

  std::string Name(Event event) const;
};

class Clocks {
 public:
  Clocks() = default;
  Clocks(uint32_t cluster, size_t agents) : cluster_(cluster), clocks_(agents) {}

  bool Has(Event e) const {
    return e.agent >> 16 == cluster_ && clocks_[e.agent & 0xffff] >= e.clock;
  }
  void Add(Event e) {
    Clock& clock = clocks_[e.agent & 0xffff];
    if (clock < e.clock) clock = e.clock;
  }
  void Join(const Clocks& other);

 private:
  uint32_t cluster_ = 0;
  std::vector<Clock> clocks_;
};

// PTX ISA, memory consistency model: causality order, and proxy-preserved base causality order.
struct Knowledge {
  Knowledge() = default;
  Knowledge(uint32_t cluster, size_t agents)
      : all(cluster, agents),
        fenced(cluster, agents),
        fenced_global(cluster, agents),
        inits(cluster, agents),
        tcgen05(cluster, agents) {}

  Clocks all;     // events that happened before
  Clocks fenced;  // of these, the ones followed by a proxy fence: what the async proxy may rely on
  Clocks fenced_global;  // the same, of fences that are for global memory too
  Clocks inits;    // events before a fence.mbarrier_init, which a relaxed cluster barrier passes on
  Clocks tcgen05;  // events before the thread's own tcgen05.fence::after_thread_sync; not passed on

  // What a release passes to an acquire.
  void JoinReleased(const Knowledge& released) {
    all.Join(released.all);
    fenced.Join(released.fenced);
    fenced_global.Join(released.fenced_global);
    inits.Join(released.inits);
  }
};

using SharedKnowledge = std::shared_ptr<const Knowledge>;

// One who accesses memory.
struct Actor {
  Event event;   // this access
  Event issuer;  // the thread's event whose program order it continues
  const Knowledge* knowledge = nullptr;
  bool async = false;    // through the async proxy
  bool tcgen05 = false;  // a tcgen05 access of tensor memory
  bool global = false;   // an access of global memory

  // Whether an earlier access is ordered before this one.
  bool Follows(Event earlier, bool earlier_was_generic_write) const {
    if (earlier.agent == 0) return true;
    const Clocks& fenced = global ? knowledge->fenced_global : knowledge->fenced;
    if (async && earlier_was_generic_write && !fenced.Has(earlier)) return false;
    if (earlier.agent == event.agent) return true;
    if (earlier.agent == issuer.agent && earlier.clock <= issuer.clock) return true;
    return (tcgen05 ? knowledge->tcgen05 : knowledge->all).Has(earlier);
  }
};

}  // namespace model

#endif  // MODEL_ORDER_H_
