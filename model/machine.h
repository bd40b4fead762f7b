// The machine: grids of clusters of CTAs of warps, and the engines that work beside them.
//
// Everything runs in one thread. A seed and a policy decide which warp runs next and for how long,
// and when an asynchronous operation takes effect; the same seed gives the same run.

#ifndef MODEL_MACHINE_H_
#define MODEL_MACHINE_H_

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "fault.h"
#include "memory.h"
#include "order.h"
#include "ptx.h"

namespace model {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kSharedBase = 1024;         // the first KiB of a CTA's window is the system's
constexpr uint32_t kSharedBytes = 228 * 1024;  // of an SM, and of a CTA's window
constexpr uint64_t kSharedGeneric = uint64_t{0x7e} << 40;  // generic address of the shared window
constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512;

using Mask = uint32_t;  // of lanes
using Lanes = std::array<uint64_t, kLanes>;
using Register = uint32_t;

struct Machine;
struct Cluster;
struct Cta;
struct Warp;

enum class Outcome { kNext, kJumped, kBlocked, kExited };
using Execute = std::function<Outcome(Warp&, Mask)>;

struct Instruction {
  Execute execute;
  bool branch = false;
  bool wait = false;  // at an mbarrier
  Register guard = 0;
  bool guarded = false, guard_negated = false;
  const Statement* statement = nullptr;
};

// A register that holds one value for the whole run: an immediate, an address, a special register.
struct Constant {
  enum Kind { kValue, kParameter, kShared, kSpecial } kind;
  uint64_t value = 0;   // kParameter: offset
  std::string special;  // kSpecial: "%tid.x"
};

// A program ready to run. Registers first, then its constants.
struct Code {
  Program program;
  std::vector<Instruction> instructions;
  std::vector<std::string> register_names;
  std::unordered_map<std::string, Register> register_index;
  std::vector<Constant> constants;
  uint32_t cta_group = 0;  // of its tcgen05 instructions
  size_t Registers() const { return register_names.size() + constants.size(); }
};

// Throws Fault("unknown") for anything that is not modelled.
std::shared_ptr<const Code> Decode(const std::string& ptx);

struct Mbarrier {
  uint32_t count = 0, pending = 0;
  int64_t tx = 0;
  uint64_t phases = 0;    // completed
  uint64_t observed = 0;  // of these, the latest that a wait has seen completed
  Event init;
  Knowledge arriving, complete;  // of the phase under way; of the last one completed
};

struct NamedBarrier {
  uint32_t expected = 0, arrived = 0;
  uint64_t generation = 0;
  std::shared_ptr<Knowledge> arriving;
};

// The threads of a warp that are at one statement.
struct Fragment {
  explicit Fragment(Mask mask, uint32_t pc = 0) : mask(mask), pc(pc) {}

  Mask mask = 0;
  uint32_t pc = 0;
  uint64_t ticket = 0;                   // of a collective that it has arrived at and now waits for
  std::shared_ptr<const Knowledge> met;  // what those at a named barrier know
  bool arrived = false;
  bool blocked = false;
  uint64_t blocked_at = 0;    // Machine::progress at that time
  uint64_t sleeps_until = 0;  // lags behind the rest of its warp until Machine::progress is that
  std::string waits_for;
};

struct Operation {  // an asynchronous operation that has not taken effect yet
  enum Queue { kLoad, kStore, kMatrix, kRemoteStore } queue;
  uint32_t lane;  // operations of one queue and lane take effect in order; kUnordered: in any
  std::function<void()> effect;
  std::string what;
  std::vector<Agent> slots;  // whose events it is
};
constexpr uint32_t kUnordered = ~0u;

struct BulkGroup {
  struct State {
    bool read = false, written = false;
    Event read_event, written_event;
  };
  std::vector<std::shared_ptr<State>> operations;
};

// What some lanes of a warp know, all the same; each knows of its own actions besides.
struct Mind {
  Mask lanes;
  std::shared_ptr<Knowledge> knowledge;
};

struct Warp {
  Warp(Cta& cta, uint32_t index, const Code& code);

  // Runs up to `budget` statements; how many it ran.
  uint64_t Run(uint64_t budget);
  bool Runnable() const;
  bool Done() const { return fragments.empty(); }

  // --- registers ---
  const uint64_t* Read(Register r, Mask m) {
    if ((defined[r] & m) != m || guarded_reads) CheckRead(r, m);
    return registers[r].data();
  }
  uint64_t* Write(Register r, Mask m) {
    if (guarded_reads) CheckWrite(r);
    defined[r] |= m;
    written_at[r] = executed;
    return registers[r].data();
  }
  void CheckRead(Register r, Mask m) const;
  void CheckWrite(Register r) const;
  // A value that must be the same in all lanes of m.
  uint64_t Uniform(Register r, Mask m, const char* what);

  // --- order ---
  Agent ThreadAgent(uint32_t lane) const { return first_agent + lane; }
  Event Now(uint32_t lane) const { return {ThreadAgent(lane), clock}; }
  void AddOwn(uint32_t lane, Clocks& to) const {  // what a lane itself did
    to.Add(Now(lane));
    if (tensor_load_agent != 0) to.Add({tensor_load_agent + lane, tensor_load_fenced[lane]});
  }
  const SharedKnowledge KnowledgeOf(uint32_t lane) const;
  void Change(Mask m,
              const std::function<void(Knowledge&, Mask)>& change);  // of what the lanes know
  void Acquire(Mask m, const Knowledge& released);
  void Release(Mask m, Knowledge& into);  // adds all that the lanes know and did
  void Meet(Mask m);                      // the lanes learn all of each other
  void Tick() { ++clock; }                // what follows is told apart from what came before
  Actor Generic(uint32_t lane) const;

  // --- control ---
  Outcome Branch(Mask taken, uint32_t target);
  // All threads of the warp that have not exited are here.
  bool Converged(Mask m) const { return m == live; }
  // The fragment waits; it is executed again when something has happened.
  template <typename... Parts>
  Outcome Block(const Parts&... why) {
    if (!current->blocked) current->waits_for = Text(why...);
    return Outcome::kBlocked;
  }

  Cta& cta;
  Machine& machine;
  const Code& code;
  const uint32_t index;  // in the CTA
  Mask live;             // threads that have not exited
  std::vector<Fragment> fragments;
  Fragment* current = nullptr;

  std::vector<Lanes> registers;
  std::vector<Mask> defined;
  std::vector<uint64_t> written_at;
  uint64_t executed = 0;

  Agent first_agent;
  Clock clock = 1;
  std::vector<Mind> minds;
  std::array<Event, kLanes> fenced_inits{};  // up to here a lane's mbarrier.inits are fenced

  std::pair<uint32_t, uint64_t>
      last_poll{};  // of a wait that returned false: the mbarrier's offset, and phase

  // --- barrier.cluster ---
  Mask cluster_arrived = 0;         // in the phase under way
  Mask cluster_waits = 0;           // arrived, and has not waited since
  uint64_t cluster_generation = 0;  // that it arrived in

  // --- copy engine: bulk groups of each lane ---
  std::array<std::deque<BulkGroup>, kLanes> bulk_groups;
  std::array<BulkGroup, kLanes> open_group;

  // --- wgmma ---
  Agent wgmma_agent = 0;
  Clock wgmma_clock = 0;                 // of the last issued
  uint64_t wgmma_fence_at = 0;           // `executed` after the last wgmma.fence; 0: none yet
  uint64_t wgmma_open = 0;               // issued since the last commit
  uint64_t wgmma_group = 1;              // that the next operation will belong to
  uint64_t wgmma_waited = 0;             // groups up to this one have been waited for
  std::map<uint64_t, Clock> wgmma_last;  // group -> clock of its last operation
  Clock wgmma_done = 0;                  // operations that have taken effect
  std::vector<uint64_t> wgmma_register;  // group whose accumulator a register is
  uint64_t wgmma_sequence = 0;
  bool guarded_reads = false;  // some register is an accumulator in flight

  // --- tcgen05 ---
  Agent tensor_load_agent = 0;  // of lane 0; the next lanes have the next
  Clock tensor_load_clock = 0, tensor_load_waited = 0;
  std::array<Clock, kLanes>
      tensor_load_fenced{};  // up to here a lane passes on that its loads are over

  int64_t max_registers;         // of a thread
  uint32_t register_claims = 0;  // setmaxnreg executed
};

struct Cta {
  Cta(Cluster& cluster, uint32_t rank);

  // --- shared memory; offsets count from the start of the window ---
  void CheckShared(uint32_t offset, uint32_t bytes, uint32_t align, const char* access) const;
  void ReadShared(uint32_t offset, uint32_t bytes, void* into, const Actor& actor,
                  uint64_t used_bytes = ~uint64_t{0});
  void WriteShared(uint32_t offset, uint32_t bytes, const void* from, const Actor& actor);
  Mbarrier& BarrierAt(uint32_t offset, const char* access);

  Cluster& cluster;
  Machine& machine;
  const uint32_t rank;
  const uint32_t block[3];
  uint32_t shared_end;  // offset after the last byte that the launch asked for
  std::vector<uint8_t> shared;
  std::vector<uint8_t> shared_written;
  std::vector<uint8_t> shared_barrier;  // per word: part of an mbarrier
  Shadow shared_shadow;
  std::unordered_map<uint32_t, Mbarrier> barriers;
  std::map<uint32_t, NamedBarrier> named_barriers;
  std::vector<std::unique_ptr<Warp>> warps;
  bool exited = false;
  // The last access to this CTA's shared memory by every agent that is not one of its threads: all
  // must be over, and known to be, when the CTA exits.
  std::map<Agent, Event> foreign;
  // Tensor maps in global memory that its threads acquired.
  struct AcquiredMap {
    Event by;
    uint64_t version;  // Allocation::MapVersion
  };
  std::map<uint64_t, std::vector<AcquiredMap>> acquired_maps;

  // --- tensor memory ---
  std::vector<uint32_t> tensor;  // [lane][column]
  std::vector<uint8_t> tensor_written;
  Shadow tensor_shadow;
  std::map<uint32_t, uint32_t> tensor_allocations;  // first column -> columns
  bool tensor_permit = true;
  uint32_t tensor_columns_max = kTensorColumns;  // of the next allocation
  Agent tensor_agent = 0;                        // the tensor pipe, as issuer
  Clock tensor_clock = 0;
  Event tensor_last;  // the last tcgen05.mma, and who issued it
  Agent tensor_issuer = 0;

  std::vector<std::vector<uint64_t>> wgmma_issued;  // per warpgroup: what its warps must all issue
  int64_t free_registers = 0;                       // what the launch leaves over is not given out
};

struct Cluster {
  Cluster(Machine& machine, uint32_t index);

  Agent AgentAt(size_t i) const { return index << 16 | static_cast<Agent>(i); }
  // A fresh event of an engine that works on its own.
  Event Start(bool writes_global = false);
  Knowledge NewKnowledge() const;
  // The CTA and offset of a shared::cluster address.
  Cta& At(uint32_t address, uint32_t* offset, const char* access);
  void Touch(Cta& cta, Event by);  // `by` accesses the CTA's shared memory
  void Post(Operation::Queue queue, uint32_t lane, std::string what, std::function<void()> effect,
            std::vector<Agent> slots = {});
  // mbarrier arrive-on and complete-tx.
  void Arrive(Cta& cta, uint32_t offset, uint32_t count, Event by,
              const std::function<void(Knowledge&)>& release);
  void CompleteTx(Cta& cta, uint32_t offset, uint32_t bytes, Event by);

  Machine& machine;
  const uint32_t index;
  std::vector<std::unique_ptr<Cta>> ctas;
  bool done = false;

  // barrier.cluster
  void SettleBarrier();  // completes it if all threads that have not exited have arrived
  uint64_t barrier_generation = 1;
  Knowledge barrier_arriving, barrier_complete;

  // tcgen05.alloc and dealloc of a pair: how many each CTA has begun
  std::map<std::pair<uint32_t, bool>, std::array<uint64_t, 2>> pair_collectives;

 private:
  void Settle(Mbarrier& barrier);

  std::vector<Clock> slots_;
  size_t next_slot_[2] = {};
};

// An mbarrier may be used by whom its initialization is ordered before.
void CheckInitKnown(Warp& warp, uint32_t lane, Cta& cta, uint32_t offset, const char* access);

struct Launch {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_bytes = 0;
  std::vector<uint8_t> parameters;
};

enum class Policy { kRandom, kEager, kLazy, kHoldLoads, kHoldStores, kHoldMatrix, kStarve };

struct Options {
  Policy policy = Policy::kRandom;
  uint64_t seed = 0;
  uint32_t starved_warp = 0;
  uint64_t max_statements = uint64_t{1} << 32;  // of a launch
  uint32_t resident_clusters = ~0u;
};

struct Statistics {
  std::map<uint32_t, uint64_t> statements;  // by warp of a CTA
  std::map<std::string, uint64_t> counts;   // "copy.load.bytes", "mbarrier.try_wait", ...
};

struct Machine {
  Machine(GlobalMemory& global, std::shared_ptr<const Code> code, const Launch& launch,
          const Options& options);
  ~Machine() { global.Free(parameters); }

  // To the end, or a Fault that says where.
  void Run();

  bool TakeEffect(bool force);
  uint64_t Random(uint64_t below) { return below < 2 ? 0 : random() % below; }

  GlobalMemory& global;
  const std::shared_ptr<const Code> code;
  const Launch launch;
  const Options options;
  const Agents agents;
  std::mt19937_64 random;
  uint64_t parameters;    // their address
  uint32_t leader;        // elect.sync picks the leader-th lane of those that may be
  uint64_t progress = 1;  // grows with whatever may wake a warp
  uint64_t statements = 0;
  const Warp* issuer = nullptr;  // whose statement is being executed
  bool give_up_waits = false;    // mbarrier.try_wait returns false instead of waiting on
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Operation> operations;
  std::vector<uint64_t> executed;  // per statement: how often, by any warp
  Statistics statistics;

 private:
  void RunWarp(Warp& warp, uint64_t budget);
  void Retire(Cluster& cluster);
  std::string Report() const;

  uint32_t next_cluster_ = 0;
};

}  // namespace model

#endif  // MODEL_MACHINE_H_
