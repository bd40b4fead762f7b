#include "decode.h"

#include <algorithm>
#include <cctype>

namespace model {
namespace {

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  for (char c : text) {
    if (c == ',') {
      parts.push_back(part);
      part.clear();
    } else if (c != ' ') {
      part += c;
    }
  }
  parts.push_back(part);
  return parts;
}

std::string Inside(const std::string& text, char open, char close) {
  if (text.size() < 2 || text.front() != open || text.back() != close) return text;
  return text.substr(1, text.size() - 2);
}

bool IsNumber(const std::string& text) {
  return !text.empty() &&
         (std::isdigit(static_cast<unsigned char>(text[0])) || (text[0] == '-' && text.size() > 1));
}

int64_t Number(const std::string& text) {
  const bool is_float = text.rfind("0f", 0) == 0 || text.rfind("0F", 0) == 0;
  const std::string digits = is_float ? text.substr(2) : text;
  size_t end = 0;
  int64_t value = 0;
  try {
    value = digits[0] == '-' ? std::stoll(digits, &end, 0)
                             : static_cast<int64_t>(std::stoull(digits, &end, is_float ? 16 : 0));
  } catch (const std::exception&) {
    end = 0;
  }
  if (end != digits.size() || (is_float && digits.size() != 8)) Raise("unknown", "number ", text);
  return value;
}

}  // namespace

std::map<std::string, Rule>& Rules() {
  static std::map<std::string, Rule> rules;
  return rules;
}

void Decoder::Unknown(const std::string& what) const {
  Raise("unknown", what, " is not modelled: line ", statement_.line, ": ",
        statement_.text.substr(0, 160));
}

bool Decoder::Take(const std::string& modifier) {
  if (at_ < statement_.modifiers.size() && statement_.modifiers[at_] == modifier) {
    ++at_;
    return true;
  }
  return false;
}

std::string Decoder::Next() {
  if (at_ >= statement_.modifiers.size()) Unknown("a missing modifier");
  return statement_.modifiers[at_++];
}

void Decoder::Done() const {
  if (at_ < statement_.modifiers.size()) Unknown("." + statement_.modifiers[at_]);
  for (size_t i = 0; i < statement_.operands.size(); ++i) {
    if (!(operands_ >> i & 1)) Unknown("operand " + statement_.operands[i]);
  }
}

const std::string& Decoder::Text(size_t i) const {
  if (i >= statement_.operands.size()) Unknown("a missing operand");
  operands_ |= uint64_t{1} << i;
  return statement_.operands[i];
}

void Decoder::SameCtaGroup(uint32_t group) {
  if (code_.cta_group == 0) code_.cta_group = group;
  if (code_.cta_group != group)
    Raise("tensor_memory", "tcgen05 instructions of both cta_groups in one kernel");
}

Register Decoder::ConstantOf(const Constant& constant) {
  for (size_t i = 0; i < code_.constants.size(); ++i) {
    const Constant& c = code_.constants[i];
    if (c.kind == constant.kind && c.value == constant.value && c.special == constant.special) {
      return code_.register_names.size() + i;
    }
  }
  code_.constants.push_back(constant);
  return code_.register_names.size() + code_.constants.size() - 1;
}

Register Decoder::DestOf(const std::string& text) {
  auto found = code_.register_index.find(text);
  if (found == code_.register_index.end()) Unknown("operand " + text);
  return found->second;
}

Register Decoder::SourceOf(const std::string& text) {
  if (IsNumber(text))
    return ConstantOf({Constant::kValue, static_cast<uint64_t>(Number(text)), ""});
  if (code_.register_index.count(text)) return DestOf(text);
  if (text[0] == '%') return ConstantOf({Constant::kSpecial, 0, text});
  for (const Parameter& parameter : code_.program.parameters) {
    if (parameter.name == text) return ConstantOf({Constant::kParameter, parameter.offset, ""});
  }
  if (text == code_.program.shared_symbol) return ConstantOf({Constant::kShared, 0, ""});
  Unknown("operand " + text);
}

Address Decoder::AddressOf(const std::string& text) {
  const std::string inner = Inside(text, '[', ']');
  const size_t sign = inner.find_first_of("+-", 1);
  if (sign == std::string::npos) return {SourceOf(inner), 0};
  const int64_t offset = Number(inner.substr(inner[sign] == '+' ? sign + 1 : sign));
  return {SourceOf(inner.substr(0, sign)), offset};
}

std::vector<std::string> Decoder::ElementsOf(const std::string& text) const {
  if (!code_.register_index.count(text + ".x")) return SplitList(Inside(text, '{', '}'));
  std::vector<std::string> elements;
  for (char c : {'x', 'y', 'z', 'w'}) {
    if (code_.register_index.count(text + "." + c)) elements.push_back(text + "." + c);
  }
  return elements;
}

std::vector<Register> Decoder::Sources(size_t i) {
  std::vector<Register> registers;
  for (const std::string& each : ElementsOf(Text(i))) registers.push_back(SourceOf(each));
  return registers;
}

std::vector<Register> Decoder::Dests(size_t i) {
  std::vector<Register> registers;
  for (const std::string& each : ElementsOf(Text(i))) registers.push_back(DestOf(each));
  return registers;
}

std::pair<Register, Register> Decoder::DestPair(size_t i) {
  const std::string& text = Text(i);
  const size_t bar = text.find('|');
  if (bar == std::string::npos) return {DestOf(text), DestOf("_")};
  return {DestOf(text.substr(0, bar)), DestOf(text.substr(bar + 1))};
}

int64_t Decoder::Immediate(size_t i) const {
  if (!IsNumber(Text(i))) Unknown("operand " + Text(i) + ", where an immediate is meant,");
  return Number(Text(i));
}

uint32_t Decoder::Target(size_t i) const {
  auto found = code_.program.labels.find(Text(i));
  if (found == code_.program.labels.end()) Unknown("label " + Text(i));
  return found->second;
}

std::pair<Register, std::vector<Register>> Decoder::TensorCoordinates(size_t i) {
  const std::string inner = Inside(Text(i), '[', ']');
  const size_t comma = inner.find(',');
  if (comma == std::string::npos) Unknown("operand " + Text(i));
  const size_t brace = inner.find('{');
  std::vector<Register> coordinates;
  for (const std::string& each : SplitList(inner.substr(brace + 1, inner.size() - brace - 2))) {
    coordinates.push_back(SourceOf(each));
  }
  return {SourceOf(inner.substr(0, comma)), coordinates};
}

uint32_t BytesOf(Decoder& d, const std::string& type) {
  const size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos || std::string("bsuf").find(type[0]) == std::string::npos)
    d.Unknown("type ." + type);
  return std::stoul(type.substr(digits)) / 8;
}

std::shared_ptr<const Code> Decode(const std::string& ptx) {
  auto code = std::make_shared<Code>();
  code->program = ParsePtx(ptx);
  code->register_names.push_back("_");
  for (const auto& [name, bits] : code->program.register_bits) code->register_names.push_back(name);
  for (size_t i = 0; i < code->register_names.size(); ++i)
    code->register_index[code->register_names[i]] = i;
  for (const Statement& statement : code->program.statements) {
    std::string opcode = statement.opcode;
    auto rule = Rules().find(opcode);
    while (rule == Rules().end()) {
      const size_t dot = opcode.rfind('.');
      if (dot == std::string::npos) Decoder(*code, statement).Unknown(statement.opcode);
      opcode.resize(dot);
      rule = Rules().find(opcode);
    }
    Decoder decoder(*code, statement);
    size_t taken = 0;
    for (char c : opcode) taken += c == '.';
    decoder.Skip(taken);
    Instruction instruction;
    try {
      instruction.execute = rule->second.decode(decoder);
    } catch (const Fault& fault) {
      if (std::string(fault.what()).find("line ") != std::string::npos) throw;
      decoder.Unknown(fault.what());
    }
    instruction.branch = opcode == "bra";
    instruction.wait = opcode == "mbarrier.try_wait.parity";
    instruction.statement = &statement;
    if (!statement.guard.empty()) {
      instruction.guarded = true;
      instruction.guard_negated = statement.guard_negated;
      instruction.guard = decoder.SourceOf(statement.guard);
    }
    decoder.Done();
    code->instructions.push_back(std::move(instruction));
  }
  return code;
}

}  // namespace model
