#include "machine.h"

#include <algorithm>
#include <numeric>

namespace model {
namespace {

constexpr uint64_t kUntilQuiet = ~uint64_t{0};  // until nothing else can go on

// CUDA programming guide, compute capabilities: registers of an SM; given out to warps in units of
// 8 per thread.
constexpr int64_t kRegisters = 64 * 1024;

uint32_t Threads(const Launch& launch) {
  return launch.block[0] * launch.block[1] * launch.block[2];
}
// What a thread has at the start of a kernel that is meant to be alone on its SM.
int64_t RegistersOfThread(const Launch& launch) {
  return std::min<int64_t>(255, kRegisters / Threads(launch)) / 8 * 8;
}
uint32_t Ctas(const Launch& launch) {
  return launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
}

uint32_t ClusterCount(const Launch& launch, int axis) {
  return launch.grid[axis] / launch.cluster[axis];
}

// PTX ISA, special registers.
uint64_t Special(const std::string& name, const Warp& warp, uint32_t lane) {
  const Cta& cta = warp.cta;
  const Launch& launch = warp.machine.launch;
  const uint32_t thread = warp.index * kLanes + lane;
  const uint32_t* block = launch.block;
  const size_t dot = name.find('.');
  const std::string base = name.substr(1, dot == std::string::npos ? dot : dot - 1);
  const int axis = dot == std::string::npos ? 0 : name[dot + 1] - 'x';
  if (base == "tid") {
    const uint32_t tid[3] = {thread % block[0], thread / block[0] % block[1],
                             thread / block[0] / block[1]};
    return tid[axis];
  }
  if (base == "ntid") return block[axis];
  if (base == "laneid") return lane;
  if (base == "warpid") return warp.index;
  if (base == "ctaid") return cta.block[axis];
  if (base == "nctaid") return launch.grid[axis];
  if (base == "clusterid") return cta.block[axis] / launch.cluster[axis];
  if (base == "nclusterid") return ClusterCount(launch, axis);
  if (base == "cluster_ctaid") return cta.block[axis] % launch.cluster[axis];
  if (base == "cluster_nctaid") return launch.cluster[axis];
  if (base == "cluster_ctarank") return cta.rank;
  if (base == "cluster_nctarank") return Ctas(launch);
  Raise("unknown", "special register ", name);
}

// The CTA of a rank within a cluster, x fastest (PTX ISA, %cluster_ctarank).
uint32_t BlockOf(const Launch& launch, uint32_t cluster, uint32_t rank, int axis) {
  const uint32_t* c = launch.cluster;
  const uint32_t in_cluster[3] = {rank % c[0], rank / c[0] % c[1], rank / c[0] / c[1]};
  const uint32_t nx = ClusterCount(launch, 0), ny = ClusterCount(launch, 1);
  const uint32_t of_cluster[3] = {cluster % nx, cluster / nx % ny, cluster / nx / ny};
  return of_cluster[axis] * c[axis] + in_cluster[axis];
}

}  // namespace

// --- warps ---

Warp::Warp(Cta& cta, uint32_t index, const Code& code)
    : cta(cta),
      machine(cta.machine),
      code(code),
      index(index),
      registers(code.Registers()),
      defined(code.Registers()),
      written_at(code.Registers()),
      first_agent(cta.cluster.AgentAt(cta.machine.agents.Thread(cta.rank, index * kLanes))),
      wgmma_register(code.Registers()),
      max_registers(RegistersOfThread(machine.launch)) {
  const uint32_t threads = std::min(kLanes, Threads(machine.launch) - index * kLanes);
  live = threads == kLanes ? ~Mask{0} : (Mask{1} << threads) - 1;
  fragments.emplace_back(live);
  minds.push_back({live, std::make_shared<Knowledge>(cta.cluster.NewKnowledge())});
  for (size_t i = 0; i < code.constants.size(); ++i) {
    const Constant& constant = code.constants[i];
    const Register r = code.register_names.size() + i;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      uint64_t value = constant.value;
      if (constant.kind == Constant::kParameter) value += machine.parameters;
      if (constant.kind == Constant::kShared) value += uint64_t{cta.rank} << 24 | kSharedBase;
      if (constant.kind == Constant::kSpecial) value = Special(constant.special, *this, lane);
      registers[r][lane] = value;
    }
    defined[r] = ~Mask{0};
  }
}

void Warp::CheckRead(Register r, Mask m) const {
  const std::string name = r < code.register_names.size() ? code.register_names[r] : "a constant";
  if ((defined[r] & m) != m) Raise("uninitialized", "register ", name, " holds no value");
  if (wgmma_register[r] > wgmma_waited) {
    Raise("registers", "register ", name,
          " is an accumulator of a wgmma that has not been waited for");
  }
}

void Warp::CheckWrite(Register r) const {
  if (wgmma_register[r] > wgmma_waited) {
    Raise("registers", "register ", code.register_names[r],
          " is written, but is an accumulator of a wgmma that has not been waited for");
  }
}

uint64_t Warp::Uniform(Register r, Mask m, const char* what) {
  const uint64_t* values = Read(r, m);
  const int first = __builtin_ctz(m);
  for (uint32_t lane = first; lane < kLanes; ++lane) {
    if (m >> lane & 1 && values[lane] != values[first])
      Raise("unknown", what, " differs between lanes");
  }
  return values[first];
}

const SharedKnowledge Warp::KnowledgeOf(uint32_t lane) const {
  for (const Mind& mind : minds) {
    if (mind.lanes >> lane & 1) return mind.knowledge;
  }
  return nullptr;
}

Actor Warp::Generic(uint32_t lane) const {
  const Event now = Now(lane);
  return {now, now, KnowledgeOf(lane).get()};
}

void Warp::Change(Mask m, const std::function<void(Knowledge&, Mask)>& change) {
  const size_t n = minds.size();
  for (size_t i = 0; i < n; ++i) {
    const Mask part = minds[i].lanes & m;
    if (part == 0) continue;
    size_t at = i;
    if (part != minds[i].lanes) {
      minds[i].lanes &= ~part;
      minds.push_back({part, std::make_shared<Knowledge>(*minds[i].knowledge)});
      at = minds.size() - 1;
    } else if (minds[i].knowledge.use_count() >
               1) {  // an operation under way remembers it as it was
      minds[i].knowledge = std::make_shared<Knowledge>(*minds[i].knowledge);
    }
    change(*minds[at].knowledge, part);
  }
}

void Warp::Acquire(Mask m, const Knowledge& released) {
  Change(m, [&](Knowledge& k, Mask) { k.JoinReleased(released); });
}

void Warp::Release(Mask m, Knowledge& into) {
  for (const Mind& mind : minds) {
    if (mind.lanes & m) into.JoinReleased(*mind.knowledge);
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (m >> lane & 1) AddOwn(lane, into.all);
  }
  Tick();
}

void Warp::Meet(Mask m) {
  auto together = std::make_shared<Knowledge>(cta.cluster.NewKnowledge());
  std::vector<Mind> others;
  for (Mind& mind : minds) {
    if ((mind.lanes & m) == 0) {
      others.push_back(mind);
      continue;
    }
    together->JoinReleased(*mind.knowledge);
    // A tcgen05.fence is the thread's own, but the lanes of a warp issue tcgen05 loads together.
    together->tcgen05.Join(mind.knowledge->tcgen05);
    mind.lanes &= ~m;
    if (mind.lanes != 0) others.push_back(mind);
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (m >> lane & 1) AddOwn(lane, together->all);
  }
  minds = std::move(others);
  minds.push_back({m, std::move(together)});
  Tick();
}

Outcome Warp::Branch(Mask taken, uint32_t target) {
  Fragment& here = *current;
  if (taken == here.mask) {
    here.pc = target;
    return Outcome::kJumped;
  }
  here.mask &= ~taken;
  ++here.pc;
  fragments.emplace_back(taken, target);  // `current` is not used any more
  return Outcome::kJumped;
}

bool Warp::Runnable() const {
  for (const Fragment& f : fragments) {
    if ((!f.blocked || f.blocked_at != machine.progress) && f.sleeps_until <= machine.progress)
      return true;
  }
  return false;
}

uint64_t Warp::Run(uint64_t budget) {
  uint64_t ran = 0;
  while (ran < budget && !fragments.empty()) {
    // Divergent lanes: lowest statement first, so that they meet again; now and then another.
    size_t pick = fragments.size();
    for (size_t i = 0; i < fragments.size(); ++i) {
      const Fragment& f = fragments[i];
      if (f.blocked && f.blocked_at == machine.progress) continue;
      if (f.sleeps_until > machine.progress) continue;
      if (pick == fragments.size() || f.pc < fragments[pick].pc ||
          (machine.options.policy == Policy::kRandom && machine.Random(4) == 0)) {
        pick = i;
      }
    }
    if (pick == fragments.size()) break;
    current = &fragments[pick];
    if (current->pc >= code.instructions.size())
      Raise("bounds", "a thread runs past the kernel's last statement");
    const Instruction& instruction = code.instructions[current->pc];
    Mask m = current->mask;
    if (instruction.guarded) {
      const uint64_t* p = Read(instruction.guard, m);
      Mask on = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane) on |= static_cast<Mask>(p[lane] & 1) << lane;
      m &= instruction.guard_negated ? ~on : on;
    }
    // Lanes of a warp need not go on together, unless an instruction says so.
    if (instruction.wait && machine.options.policy == Policy::kRandom && m == current->mask &&
        !current->blocked && machine.Random(8) == 0) {
      const Mask behind = m & static_cast<Mask>(machine.random());
      if (behind != 0 && behind != m) {
        current->mask &= ~behind;
        m &= ~behind;
        fragments.emplace_back(behind, current->pc);
        fragments.back().sleeps_until =
            machine.Random(2) == 0 ? kUntilQuiet : machine.progress + machine.Random(30);
        current = &fragments[pick];
      }
    }
    const uint32_t pc = current->pc;
    machine.issuer = this;
    const Outcome outcome = m == 0 ? Outcome::kNext : instruction.execute(*this, m);
    machine.issuer = nullptr;
    switch (outcome) {
      case Outcome::kBlocked:
        fragments[pick].blocked = true;
        fragments[pick].blocked_at = machine.progress;
        continue;
      case Outcome::kNext:
        ++fragments[pick].pc;
        break;
      case Outcome::kJumped:
        break;
      case Outcome::kExited:
        live &= ~m;
        fragments[pick].mask &= ~m;
        ++fragments[pick].pc;
        if (fragments[pick].mask == 0) fragments.erase(fragments.begin() + pick);
        ++machine.progress;
        break;
    }
    if (outcome != Outcome::kExited) {
      fragments[pick].blocked = fragments[pick].arrived = false;
    }
    if (m != 0 || instruction.branch) ++machine.executed[pc];
    ++executed;
    ++ran;
    for (size_t i = 0; fragments.size() > 1 && i < fragments.size(); ++i) {
      for (size_t j = i + 1; j < fragments.size();) {
        if (fragments[i].pc == fragments[j].pc && fragments[i].arrived == fragments[j].arrived &&
            fragments[i].sleeps_until <= machine.progress &&
            fragments[j].sleeps_until <= machine.progress) {
          fragments[i].mask |= fragments[j].mask;
          fragments[i].blocked = false;
          fragments.erase(fragments.begin() + j);
        } else {
          ++j;
        }
      }
    }
  }
  current = nullptr;
  return ran;
}

// --- CTAs ---

Cta::Cta(Cluster& cluster, uint32_t rank)
    : cluster(cluster),
      machine(cluster.machine),
      rank(rank),
      block{BlockOf(machine.launch, cluster.index, rank, 0),
            BlockOf(machine.launch, cluster.index, rank, 1),
            BlockOf(machine.launch, cluster.index, rank, 2)},
      shared_end(kSharedBase + machine.launch.shared_bytes),
      shared(kSharedBytes),
      shared_written(kSharedBytes),
      shared_barrier(kSharedBytes / 4),
      shared_shadow(
          [this](size_t word) {
            return Text("byte ", word * 4 - kSharedBase, " of shared memory of CTA ", this->rank,
                        " in cluster ", this->cluster.index);
          },
          kSharedBytes / 4, machine.agents),
      tensor(machine.code->program.arch >= 100 ? kTensorLanes * kTensorColumns : 0),
      tensor_written(tensor.size()),
      tensor_shadow(
          [this](size_t word) {
            return Text("lane ", word / kTensorColumns, ", column ", word % kTensorColumns,
                        " of tensor memory of CTA ", this->rank, " in cluster ",
                        this->cluster.index);
          },
          tensor.size(), machine.agents) {}

void Cta::CheckShared(uint32_t offset, uint32_t bytes, uint32_t align, const char* access) const {
  if (exited) Raise("bounds", access, ": CTA ", rank, ", whose shared memory it is, has exited");
  if (offset < kSharedBase || offset + bytes > shared_end) {
    Raise("bounds", access, " of ", bytes, " bytes at byte ",
          static_cast<int64_t>(offset) - kSharedBase, " of shared memory, which has ",
          shared_end - kSharedBase);
  }
  if (offset % align != 0) {
    Raise("alignment", access, " at byte ", offset - kSharedBase,
          " of shared memory must be aligned to ", align);
  }
}

namespace {
void CheckNoBarrier(const Cta& cta, uint32_t offset, uint32_t bytes, const char* access) {
  for (uint32_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) {
    if (cta.shared_barrier[word]) {
      Raise("barrier", access, " touches the mbarrier at byte ", word * 4 - kSharedBase,
            " of shared memory");
    }
  }
}
}  // namespace

void Cta::ReadShared(uint32_t offset, uint32_t bytes, void* into, const Actor& actor,
                     uint64_t used_bytes) {
  CheckShared(offset, bytes, 1, "read");
  CheckNoBarrier(*this, offset, bytes, "read");
  cluster.Touch(*this, actor.event);
  for (uint32_t i = 0; i < bytes; ++i) {
    if (!shared_written[offset + i] && (i >= 64 || used_bytes >> i & 1)) {
      Raise("uninitialized", "read of byte ", offset + i - kSharedBase,
            " of shared memory, never written");
    }
  }
  if (used_bytes == ~uint64_t{0}) {
    shared_shadow.Read(offset / 4, (offset % 4 + bytes + 3) / 4, actor);
  } else {
    for (uint32_t i = 0; i < bytes; i += 4) {
      if (used_bytes >> i & 0xf) shared_shadow.Read((offset + i) / 4, 1, actor);
    }
  }
  std::copy_n(shared.begin() + offset, bytes, static_cast<uint8_t*>(into));
}

void Cta::WriteShared(uint32_t offset, uint32_t bytes, const void* from, const Actor& actor) {
  CheckShared(offset, bytes, 1, "write");
  CheckNoBarrier(*this, offset, bytes, "write");
  cluster.Touch(*this, actor.event);
  shared_shadow.Write(offset / 4, (offset % 4 + bytes + 3) / 4, actor);
  std::copy_n(static_cast<const uint8_t*>(from), bytes, shared.begin() + offset);
  std::fill_n(shared_written.begin() + offset, bytes, 1);
}

Mbarrier& Cta::BarrierAt(uint32_t offset, const char* access) {
  CheckShared(offset, 8, 8, access);
  auto found = barriers.find(offset);
  if (found == barriers.end()) {
    Raise("barrier", access, ": no mbarrier was initialized at byte ", offset - kSharedBase,
          " of CTA ", rank);
  }
  return found->second;
}

// --- clusters ---

Cluster::Cluster(Machine& machine, uint32_t index)
    : machine(machine), index(index), slots_(machine.agents.ctas * Agents::kSlots) {
  const Agents& agents = machine.agents;
  barrier_arriving = barrier_complete = NewKnowledge();
  for (uint32_t rank = 0; rank < agents.ctas; ++rank) {
    ctas.push_back(std::make_unique<Cta>(*this, rank));
    Cta& cta = *ctas.back();
    cta.tensor_agent = AgentAt(agents.TensorPipe(rank));
    cta.wgmma_issued.resize((agents.Warps() + 3) / 4);
    for (uint32_t w = 0; w < agents.Warps(); ++w) {
      cta.warps.push_back(std::make_unique<Warp>(cta, w, *machine.code));
      Warp& warp = *cta.warps.back();
      (agents.tensor_loads ? warp.tensor_load_agent : warp.wgmma_agent) =
          AgentAt(agents.WarpEngine(rank, w));
    }
  }
}

Knowledge Cluster::NewKnowledge() const { return Knowledge(index, machine.agents.Count()); }

Event Cluster::Start(bool writes_global) {
  // Who knows a slot's later event passes for knowing its earlier ones: a slot is used again when
  // its operation is over and, as long as there are such, known to be. Of writes to global memory
  // nobody need ever know: these have a third of the slots to themselves.
  const size_t count = writes_global ? slots_.size() / 3 : slots_.size() - slots_.size() / 3;
  const size_t first = writes_global ? slots_.size() - count : 0;
  auto taken = [&](Agent agent) {
    return std::any_of(
        machine.operations.begin(), machine.operations.end(), [&](const Operation& operation) {
          return std::count(operation.slots.begin(), operation.slots.end(), agent) != 0;
        });
  };
  auto known = [&](Event event) {
    for (const auto& cta : ctas) {
      for (const auto& warp : cta->warps) {
        for (const Mind& mind : warp->minds) {
          if (mind.knowledge->all.Has(event)) return true;
        }
      }
    }
    return false;
  };
  for (const bool must_be_known : {!writes_global, false}) {
    for (size_t tried = 0; tried < count; ++tried) {
      const size_t slot = first + next_slot_[writes_global]++ % count;
      const Agent agent = AgentAt(machine.agents.Slot(slot));
      if (taken(agent) || (must_be_known && !known({agent, slots_[slot]}))) continue;
      return {agent, ++slots_[slot]};
    }
  }
  Raise("limit", count, " copies under way at once in a cluster");
}

Cta& Cluster::At(uint32_t address, uint32_t* offset, const char* access) {
  const uint32_t rank = address >> 24;
  if (rank >= ctas.size()) Raise("bounds", access, ": the cluster has no CTA of rank ", rank);
  *offset = address & 0xffffff;
  return *ctas[rank];
}

void Cluster::Touch(Cta& cta, Event by) {
  const uint32_t threads = Threads(machine.launch);
  const Agent first = AgentAt(machine.agents.Thread(cta.rank, 0));
  if (by.agent < first || by.agent >= first + threads) cta.foreign[by.agent] = by;
}

void Cluster::Post(Operation::Queue queue, uint32_t lane, std::string what,
                   std::function<void()> effect, std::vector<Agent> slots) {
  if (machine.issuer != nullptr) {
    const Fragment& at = *machine.issuer->current;
    what += Text(", issued by warp ", machine.issuer->index, ", line ",
                 machine.code->instructions[at.pc].statement->line);
  }
  machine.operations.push_back({queue, lane, std::move(effect), std::move(what), std::move(slots)});
}

// PTX ISA, mbarrier: phase completion.
void Cluster::Settle(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.tx != 0) return;
  ++barrier.phases;
  barrier.pending = barrier.count;
  std::swap(barrier.complete, barrier.arriving);
  barrier.arriving = NewKnowledge();
  ++machine.progress;
}

void Cluster::SettleBarrier() {
  for (auto& cta : ctas) {
    for (auto& warp : cta->warps) {
      if (warp->live & ~warp->cluster_arrived) return;
    }
  }
  for (auto& cta : ctas) {
    for (auto& warp : cta->warps) warp->cluster_arrived = 0;
  }
  ++barrier_generation;
  std::swap(barrier_complete, barrier_arriving);
  barrier_arriving = NewKnowledge();
  ++machine.progress;
}

void Cluster::Arrive(Cta& cta, uint32_t offset, uint32_t count, Event by,
                     const std::function<void(Knowledge&)>& release) {
  Mbarrier& barrier = cta.BarrierAt(offset, "arrive");
  Touch(cta, by);
  if (count > barrier.pending) {
    Raise("barrier", "arrival of ", count, " at the mbarrier at byte ", offset - kSharedBase,
          " of CTA ", cta.rank, ", whose phase waits for ", barrier.pending, " of ", barrier.count);
  }
  // PTX ISA, mbarrier: phase. Some thread sees each phase complete before an arrival at the next.
  if (barrier.observed < barrier.phases) {
    Raise("barrier", "arrival at the mbarrier at byte ", offset - kSharedBase, " of CTA ", cta.rank,
          " in phase ", barrier.phases, ", before any wait has seen the phase before complete");
  }
  release(barrier.arriving);
  barrier.pending -= count;
  Settle(barrier);
}

void Cluster::CompleteTx(Cta& cta, uint32_t offset, uint32_t bytes, Event by) {
  Mbarrier& barrier = cta.BarrierAt(offset, "complete-tx");
  Touch(cta, by);
  barrier.tx -= bytes;
  if (barrier.tx <= -(1 << 20)) Raise("barrier", "tx-count below its range");
  // Of the operation's own accesses only: PTX ISA, asynchronous operations.
  barrier.arriving.all.Add(by);
  Settle(barrier);
}

// --- the machine ---

Machine::Machine(GlobalMemory& global, std::shared_ptr<const Code> code, const Launch& launch,
                 const Options& options)
    : global(global),
      code(std::move(code)),
      launch(launch),
      options(options),
      agents{Ctas(launch), Threads(launch), this->code->program.arch >= 100},
      random(options.seed * 0x9e3779b97f4a7c15 + 1),
      executed(this->code->instructions.size()) {
  // PTX ISA, elect.sync: the same leader every time; which one is not said.
  leader = options.policy == Policy::kRandom ? random() % kLanes : 0;
  const Program& program = this->code->program;
  if (program.threads != 0 && program.threads != Threads(launch)) {
    throw std::runtime_error(
        Text("launch of ", Threads(launch), " threads, .reqntid ", program.threads));
  }
  if (launch.parameters.size() != program.parameter_bytes) {
    throw std::runtime_error(Text("launch with ", launch.parameters.size(),
                                  " bytes of parameters, the kernel takes ",
                                  program.parameter_bytes));
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] % launch.cluster[axis] != 0)
      throw std::runtime_error("the grid is no multiple of the cluster");
  }
  if (kSharedBase + launch.shared_bytes > kSharedBytes)
    throw std::runtime_error("more shared memory than an SM has");
  parameters = global.Allocate("kernel parameters", std::max<size_t>(launch.parameters.size(), 1),
                               4096, false);
  Allocation& held = global.Find(parameters, launch.parameters.size(), "parameters");
  std::copy(launch.parameters.begin(), launch.parameters.end(), held.bytes.begin());
  std::fill(held.written.begin(), held.written.end(), 1);
}

bool Machine::TakeEffect(bool force) {
  auto held = [&](const Operation& operation) {
    switch (options.policy) {
      case Policy::kLazy:
        return true;
      case Policy::kHoldLoads:
        return operation.queue == Operation::kLoad;
      case Policy::kHoldStores:
        return operation.queue == Operation::kStore;
      case Policy::kHoldMatrix:
        return operation.queue == Operation::kMatrix;
      default:
        return false;
    }
  };
  std::vector<size_t> may, must_wait;
  std::vector<std::pair<int, uint32_t>> seen;
  for (size_t i = 0; i < operations.size(); ++i) {
    const Operation& operation = operations[i];
    if (operation.lane != kUnordered) {
      const std::pair<int, uint32_t> key{operation.queue, operation.lane};
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) continue;
      seen.push_back(key);
    }
    (held(operation) ? must_wait : may).push_back(i);
  }
  if (may.empty() && force) may = must_wait;
  if (may.empty()) return false;
  const size_t at = options.policy == Policy::kRandom ? may[Random(may.size())] : may.front();
  const Operation operation = std::move(operations[at]);
  operations.erase(operations.begin() + at);
  try {
    operation.effect();
  } catch (const Fault& fault) {
    throw Fault(fault.kind, Text(fault.what(), "\n  in ", operation.what));
  }
  ++progress;
  return true;
}

void Machine::RunWarp(Warp& warp, uint64_t budget) {
  try {
    const uint64_t ran = warp.Run(budget);
    statements += ran;
    statistics.statements[warp.index] += ran;
  } catch (const Fault& fault) {
    const Statement& at =
        *code->instructions[std::min<size_t>(warp.current->pc, code->instructions.size() - 1)]
             .statement;
    throw Fault(fault.kind, Text(fault.what(), "\n  in cluster ", warp.cta.cluster.index, ", CTA ",
                                 warp.cta.rank, ", warp ", warp.index, ", line ", at.line, ": ",
                                 at.text.substr(0, 120)));
  }
  if (statements > options.max_statements)
    Raise("limit", "more than ", options.max_statements, " statements\n", Report());
}

std::string Machine::Report() const {
  std::ostringstream out;
  for (const auto& cluster : clusters) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        for (const Fragment& f : warp->fragments) {
          const Statement& at =
              *code->instructions[std::min<size_t>(f.pc, code->instructions.size() - 1)].statement;
          out << "  cluster " << cluster->index << " CTA " << cta->rank << " warp " << warp->index
              << " lanes " << std::hex << f.mask << std::dec << ", line " << at.line << ": "
              << at.text.substr(0, 90) << "\n    waits for "
              << (f.blocked ? f.waits_for : "nothing") << "\n";
        }
      }
      std::map<uint32_t, const Mbarrier*> sorted;
      for (const auto& [offset, barrier] : cta->barriers) sorted[offset] = &barrier;
      for (const auto& [offset, barrier] : sorted) {
        out << "  cluster " << cluster->index << " CTA " << cta->rank << " mbarrier at byte "
            << offset - kSharedBase << ": phase " << barrier->phases << ", waits for "
            << barrier->pending << " of " << barrier->count << " arrivals, tx-count " << barrier->tx
            << "\n";
      }
    }
  }
  for (const Operation& operation : operations) out << "  under way: " << operation.what << "\n";
  return out.str();
}

void Machine::Retire(Cluster& cluster) {
  bool all = true;
  for (auto& cta : cluster.ctas) {
    if (cta->exited) continue;
    bool done = true;
    for (auto& warp : cta->warps) done = done && warp->Done();
    if (!done) {
      all = false;
      continue;
    }
    // Whatever others did to its shared memory is over, and its threads know.
    Knowledge known = cluster.NewKnowledge();
    for (auto& warp : cta->warps) {
      for (const Mind& mind : warp->minds) known.JoinReleased(*mind.knowledge);
    }
    for (const auto& [agent, event] : cta->foreign) {
      if (!known.all.Has(event)) {
        Raise("race", "CTA ", cta->rank, " of cluster ", cluster.index,
              " exits, but none of its threads knows that ", agents.Name(event),
              " is done with its shared memory");
      }
    }
    if (!cta->tensor_allocations.empty()) {
      Raise("tensor_memory", "CTA ", cta->rank, " exits with tensor memory allocated");
    }
    for (size_t group = 0; group < cta->wgmma_issued.size(); ++group) {
      for (size_t w = 4 * group; w < std::min(cta->warps.size(), 4 * group + 4); ++w) {
        if (cta->warps[w]->wgmma_sequence != cta->wgmma_issued[group].size()) {
          Raise("registers", "the warps of warpgroup ", group,
                " issued different numbers of wgmma");
        }
        if (cta->warps[w]->register_claims != cta->warps[4 * group]->register_claims) {
          Raise("registers", "the warps of warpgroup ", group,
                " executed different numbers of setmaxnreg");
        }
      }
    }
    cta->exited = true;
    ++progress;
  }
  cluster.done = all;
}

void Machine::Run() {
  for (auto& [base, allocation] : global.allocations()) {
    allocation.shadow = nullptr;
    allocation.agents = &agents;
    allocation.atomic_words.clear();
    for (auto& [at, slot] : allocation.slots) slot.release = {};  // before all of this launch
  }
  const uint32_t total =
      ClusterCount(launch, 0) * ClusterCount(launch, 1) * ClusterCount(launch, 2);
  uint64_t gave_up_at = 0;
  for (;;) {
    clusters.erase(
        std::remove_if(clusters.begin(), clusters.end(), [](auto& c) { return c->done; }),
        clusters.end());
    while (next_cluster_ < total && clusters.size() < options.resident_clusters) {
      clusters.push_back(std::make_unique<Cluster>(*this, next_cluster_++));
    }
    if (clusters.empty()) break;

    std::vector<Warp*> runnable, starved;
    for (auto& cluster : clusters) {
      for (auto& cta : cluster->ctas) {
        for (auto& warp : cta->warps) {
          if (warp->Done() || !warp->Runnable()) continue;
          const bool starve =
              options.policy == Policy::kStarve && warp->index == options.starved_warp;
          (starve ? starved : runnable).push_back(warp.get());
        }
      }
    }
    if (runnable.empty()) {
      if (TakeEffect(true)) continue;
      runnable = starved;
      bool woken = false;
      for (auto& cluster : clusters) {
        for (auto& cta : cluster->ctas) {
          for (auto& warp : cta->warps) {
            for (Fragment& f : warp->fragments) {
              woken = woken || f.sleeps_until > progress;
              f.sleeps_until = 0;
            }
          }
        }
      }
      if (woken) continue;
    }
    if (runnable.empty()) {
      if (gave_up_at == progress) Raise("deadlock", "no warp can go on\n", Report());
      // mbarrier.try_wait may return false at any time: a kernel that waits that way in a loop
      // comes back here.
      gave_up_at = progress;
      give_up_waits = true;
      for (auto& cluster : clusters) {
        for (auto& cta : cluster->ctas) {
          for (auto& warp : cta->warps) {
            for (Fragment& f : warp->fragments) f.blocked_at = 0;
            if (!warp->Done()) RunWarp(*warp, 1);
          }
        }
      }
      give_up_waits = false;
      for (auto& cluster : clusters) Retire(*cluster);
      continue;
    }
    if (options.policy == Policy::kRandom) std::shuffle(runnable.begin(), runnable.end(), random);
    for (Warp* warp : runnable) {
      uint64_t budget =
          options.policy == Policy::kStarve && !starved.empty() && warp == starved.front()
              ? 20
              : 1 << 20;
      if (options.policy == Policy::kRandom) {
        constexpr uint64_t kBudgets[] = {3, 30, 300, 1 << 20};
        budget = kBudgets[Random(4)];
      }
      RunWarp(*warp, budget);
    }
    for (auto& cluster : clusters) Retire(*cluster);
    if (options.policy == Policy::kRandom) {
      constexpr uint64_t kEffects[] = {0, 1, 1, 2, 5};
      for (uint64_t n = kEffects[Random(5)]; n > 0 && TakeEffect(false); --n) {
      }
    } else {
      while (TakeEffect(false)) {
      }
    }
  }
  while (!operations.empty()) TakeEffect(true);
  for (auto& [base, allocation] : global.allocations()) {
    for (const auto& [at, slot] : allocation.slots) {
      if (slot.map && !slot.released) {
        Raise("proxy", "the tensor map at byte ", at, " of ", allocation.name,
              " was written, but its writer executed no fence.proxy.tensormap::generic.release "
              "since");
      }
    }
  }
}

}  // namespace model
