// From a statement to what executes it. Every instruction is defined in one place, by INSTRUCTION.

#ifndef MODEL_DECODE_H_
#define MODEL_DECODE_H_

#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "machine.h"

namespace model {

// [register + offset]
struct Address {
  Register base;
  int64_t offset;
  uint64_t Of(const uint64_t* values, uint32_t lane) const { return values[lane] + offset; }
};

class Decoder {
 public:
  Decoder(Code& code, const Statement& statement) : code_(code), statement_(statement) {}

  // --- modifiers, from left to right; what is left at the end is an error, as is an operand that
  // nobody looked at ---
  bool Take(const std::string& modifier);
  std::string Next();
  void Skip(size_t n) { at_ += n; }
  void Done() const;

  // --- operands ---
  size_t Count() const { return statement_.operands.size(); }
  const std::string& Text(size_t i) const;
  Register Source(size_t i) { return SourceOf(Text(i)); }
  Register Dest(size_t i) { return DestOf(Text(i)); }
  Address At(size_t i) { return AddressOf(Text(i)); }
  std::vector<Register> Sources(size_t i);  // {a, b, ...}, a vector register's elements, or one
  std::vector<Register> Dests(size_t i);
  std::pair<Register, Register> DestPair(size_t i);  // a|b; b is a sink where it is missing
  int64_t Immediate(size_t i) const;
  uint32_t Target(size_t i) const;  // of a branch
  // [map, {x, y, ...}]
  std::pair<Register, std::vector<Register>> TensorCoordinates(size_t i);

  Register SourceOf(const std::string& text);
  Register DestOf(const std::string& text);
  Address AddressOf(const std::string& text);

  uint64_t UsedBytes() const { return statement_.used_bytes; }
  void SameCtaGroup(uint32_t group);  // as in every tcgen05 instruction before
  [[noreturn]] void Unknown(const std::string& what) const;

 private:
  Register ConstantOf(const Constant& constant);
  std::vector<std::string> ElementsOf(const std::string& text) const;

  Code& code_;
  const Statement& statement_;
  size_t at_ = 0;
  mutable uint64_t operands_ = 0;  // that were looked at
};

struct Rule {
  const char* isa;  // the section that it implements
  Execute (*decode)(Decoder&);
};

// By opcode; the longest one that a statement's opcode starts with applies, and its other modifiers
// are left to `decode`.
std::map<std::string, Rule>& Rules();

struct Registration {
  Registration(const char* opcode, const char* isa, Execute (*decode)(Decoder&)) {
    if (!Rules().emplace(opcode, Rule{isa, decode}).second) std::abort();  // defined twice
  }
};

// INSTRUCTION(name, "opcode", "section of the PTX ISA") { ... return Execute; }.
#define INSTRUCTION(name, opcode, isa)                              \
  static Execute name(Decoder& d);                                  \
  static const Registration registration_##name(opcode, isa, name); \
  static Execute name([[maybe_unused]] Decoder& d)

// --- helpers of the instructions that compute lane by lane ---

template <typename T>
T As(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));  // the low bytes: registers are little-endian
  return value;
}

template <typename T>
uint64_t Bits(T value) {
  if constexpr (std::is_same_v<T, bool>) return value;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename F>
void ForLanes(Mask m, F f) {
  for (; m != 0; m &= m - 1) f(static_cast<uint32_t>(__builtin_ctz(m)));
}

// out = f(sources...), each source read as a T.
template <typename T, typename F>
Execute Lanewise(Register out, Register a, F f) {
  return [=](Warp& w, Mask m) {
    const uint64_t* x = w.Read(a, m);
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t l) { z[l] = Bits(f(As<T>(x[l]))); });
    return Outcome::kNext;
  };
}
template <typename T, typename F>
Execute Lanewise(Register out, Register a, Register b, F f) {
  return [=](Warp& w, Mask m) {
    const uint64_t *x = w.Read(a, m), *y = w.Read(b, m);
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t l) { z[l] = Bits(f(As<T>(x[l]), As<T>(y[l]))); });
    return Outcome::kNext;
  };
}
template <typename T, typename F>
Execute Lanewise(Register out, Register a, Register b, Register c, F f) {
  return [=](Warp& w, Mask m) {
    const uint64_t *x = w.Read(a, m), *y = w.Read(b, m), *v = w.Read(c, m);
    uint64_t* z = w.Write(out, m);
    ForLanes(m, [&](uint32_t l) { z[l] = Bits(f(As<T>(x[l]), As<T>(y[l]), As<T>(v[l]))); });
    return Outcome::kNext;
  };
}

template <typename T>
struct Type {
  using type = T;
};

// Calls f with Type<T>, the C++ type of a PTX integer type.
template <typename F>
Execute WithInteger(Decoder& d, const std::string& type, F f) {
  if (type == "s16") return f(Type<int16_t>());
  if (type == "u16" || type == "b16") return f(Type<uint16_t>());
  if (type == "s32") return f(Type<int32_t>());
  if (type == "u32" || type == "b32") return f(Type<uint32_t>());
  if (type == "s64") return f(Type<int64_t>());
  if (type == "u64" || type == "b64") return f(Type<uint64_t>());
  d.Unknown("type ." + type);
}

uint32_t BytesOf(Decoder& d, const std::string& type);

}  // namespace model

#endif  // MODEL_DECODE_H_
