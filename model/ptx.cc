#include "ptx.h"

#include <cctype>
#include <set>
#include <stdexcept>

namespace model {
namespace {

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error("PTX: " + what); }

bool IsNameStart(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$';
}
bool IsName(char c) { return IsNameStart(c) || std::isdigit(static_cast<unsigned char>(c)); }

// Comments blanked, line breaks kept.
std::string WithoutComments(std::string text) {
  for (size_t at = text.find("//"); at != std::string::npos; at = text.find("//", at)) {
    while (at < text.size() && text[at] != '\n') text[at++] = ' ';
  }
  return text;
}

std::string Squeeze(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (std::isspace(static_cast<unsigned char>(c))) c = ' ';
    if (c != ' ' || (!out.empty() && out.back() != ' ')) out += c;
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c == separator && depth == 0) {
      parts.push_back(Squeeze(part));
      part.clear();
    } else {
      part += c;
    }
  }
  part = Squeeze(part);
  if (!part.empty()) parts.push_back(part);
  return parts;
}

int BitsOf(const std::string& type) {
  if (type == "pred") return 1;
  const size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) Fail("unknown type ." + type);
  return std::stoi(type.substr(digits));
}

// A ".param" declaration; `end` is where the parameter before it ends.
Parameter ParseParameter(const std::string& declaration, uint32_t end) {
  Parameter parameter{"", 0, 0, 0};
  const std::vector<std::string> words = Split(declaration, ' ');
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == ".align" && i > 0 && words[i - 1] == ".param")
      parameter.align = std::stoul(words[i + 1]);
    const std::string& word = words[i];
    if (word.size() > 1 && word[0] == '.' &&
        std::string("bsuf").find(word[1]) != std::string::npos &&
        std::isdigit(static_cast<unsigned char>(word[2])) && parameter.size == 0) {
      parameter.size = BitsOf(word.substr(1)) / 8;
    }
  }
  parameter.name = words.back();
  const size_t bracket = parameter.name.find('[');
  if (bracket != std::string::npos) {
    parameter.size *= std::stoul(parameter.name.substr(bracket + 1));
    parameter.name.resize(bracket);
  }
  if (parameter.size == 0) Fail("parameter not understood: " + declaration);
  if (parameter.align == 0) parameter.align = parameter.size;
  parameter.offset = (end + parameter.align - 1) / parameter.align * parameter.align;
  return parameter;
}

class Parser {
 public:
  explicit Parser(const std::string& source) : text_(WithoutComments(source)) {}

  Program Parse() {
    const size_t target = text_.find(".target sm_");
    if (target == std::string::npos) Fail("no .target");
    program_.arch = std::stoi(text_.substr(target + 11));
    const size_t entry = text_.find(".entry");
    if (entry == std::string::npos) Fail("no .entry");
    if (text_.find(".entry", entry + 1) != std::string::npos) Fail("more than one .entry");
    const size_t open = text_.find('(', entry);
    program_.name = Squeeze(text_.substr(entry + 6, open - entry - 6));
    const size_t close = text_.find(')', open);
    for (const std::string& declaration : Split(text_.substr(open + 1, close - open - 1), ',')) {
      program_.parameters.push_back(ParseParameter(declaration, program_.parameter_bytes));
      const Parameter& last = program_.parameters.back();
      program_.parameter_bytes = last.offset + last.size;
    }
    const size_t shared = text_.find(".extern .shared");
    if (shared != std::string::npos) {
      const size_t end = text_.find('[', shared);
      const size_t begin = text_.rfind(' ', end) + 1;
      program_.shared_symbol = text_.substr(begin, end - begin);
    }
    const size_t body = text_.find('{', close);
    const std::string directives = text_.substr(close + 1, body - close - 1);
    const size_t threads = directives.find(".reqntid");
    if (threads != std::string::npos) program_.threads = std::stoul(directives.substr(threads + 8));
    ParseBody(body);
    return std::move(program_);
  }

 private:
  struct Scope {
    int id;
    std::set<std::string> names;  // registers and labels declared in it
  };

  size_t EndOfScope(size_t at) const {
    for (int depth = 0; at < text_.size(); ++at) {
      depth += text_[at] == '{';
      depth -= text_[at] == '}';
      if (depth == 0) return at;
    }
    Fail("a brace is not closed");
  }

  // What the block at `begin` declares: inline assembly repeats the same names in every block.
  std::set<std::string> Declared(size_t begin, size_t end) const {
    std::set<std::string> names;
    for (size_t at = begin + 1; at < end; ++at) {
      if (text_[at] != ':' || text_[at + 1] == ':' || text_[at - 1] == ':') continue;
      size_t last = at;
      while (std::isspace(static_cast<unsigned char>(text_[last - 1]))) --last;
      size_t first = last;
      while (IsName(text_[first - 1])) --first;
      names.insert(text_.substr(first, last - first));
    }
    for (size_t at = text_.find(".reg", begin); at < end; at = text_.find(".reg", at + 1)) {
      const std::string declaration = Squeeze(text_.substr(at, text_.find(';', at) - at));
      const bool vector = declaration.rfind(".reg .v", 0) == 0;
      const size_t list = declaration.find(' ', vector ? 9 : 5);
      for (const std::string& each : Split(declaration.substr(list), ',')) names.insert(each);
    }
    return names;
  }

  std::string Renamed(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (scope->names.count(name)) return name + "@" + std::to_string(scope->id);
    }
    return name;
  }

  // Every plain name of an operand; registers with a '%' are the kernel's own.
  std::string RenamedAll(const std::string& text) const {
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const bool starts =
          IsNameStart(text[at]) &&
          (at == 0 || (text[at - 1] != '%' && text[at - 1] != '.' && !IsName(text[at - 1])));
      size_t end = at + 1;
      if (starts) {
        while (end < text.size() && IsName(text[end])) ++end;
        out += Renamed(text.substr(at, end - at));
      } else {
        out += text[at];
      }
      at = end;
    }
    return out;
  }

  void Declare(const std::string& statement) {
    if (statement.rfind(".reg", 0) != 0) return;
    const std::vector<std::string> words = Split(statement, ' ');
    const bool vector = words.at(1).rfind(".v", 0) == 0;
    const std::string& type = words.at(vector ? 2 : 1);
    const int bits = BitsOf(type.substr(1));
    const std::string list = statement.substr(statement.find(type) + type.size());
    for (const std::string& each : Split(list, ',')) {
      if (vector) {  // PTX ISA 5.4.2: its elements have names of their own
        const size_t elements = std::stoul(words[1].substr(2));
        for (size_t i = 0; i < elements; ++i)
          program_.register_bits[Renamed(each) + "." + "xyzw"[i]] = bits;
        continue;
      }
      const size_t count = each.find('<');
      if (count == std::string::npos) {
        program_.register_bits[Renamed(each)] = bits;
        continue;
      }
      const int n = std::stoi(each.substr(count + 1));
      for (int i = 0; i < n; ++i)
        program_.register_bits[each.substr(0, count) + std::to_string(i)] = bits;
    }
  }

  void AddStatement(std::string text, int line) {
    Statement statement;
    statement.line = line;
    statement.text = text;
    statement.used_bytes = used_bytes_;
    used_bytes_ = ~uint64_t{0};
    if (text[0] == '@') {
      const size_t end = text.find(' ');
      statement.guard_negated = text[1] == '!';
      statement.guard = Renamed(
          text.substr(statement.guard_negated ? 2 : 1, end - (statement.guard_negated ? 2 : 1)));
      text = text.substr(end + 1);
    }
    const size_t end = text.find(' ');
    statement.opcode = text.substr(0, end);
    statement.modifiers = Split(statement.opcode, '.');
    statement.modifiers.erase(statement.modifiers.begin());
    if (end != std::string::npos) statement.operands = Split(RenamedAll(text.substr(end + 1)), ',');
    program_.statements.push_back(std::move(statement));
  }

  void ParseBody(size_t begin) {
    const size_t end = EndOfScope(begin);
    int line = 1;
    for (size_t at = 0; at < begin; ++at) line += text_[at] == '\n';
    int scope_ids = 0;
    std::string pending;
    int pending_line = line;
    for (size_t at = begin + 1; at < end; ++at) {
      const char c = text_[at];
      line += c == '\n';
      const bool blank = Squeeze(pending).empty();
      if (c == '{' && blank) {
        scopes_.push_back({++scope_ids, Declared(at, EndOfScope(at))});
      } else if (c == '}' && blank) {
        scopes_.pop_back();
      } else if (c == ':' && text_[at + 1] != ':' && text_[at - 1] != ':') {
        const std::string label = Renamed(Squeeze(pending));
        if (!program_.labels.emplace(label, program_.statements.size()).second)
          Fail("label twice: " + label);
        pending.clear();
      } else if (c == ';') {
        const std::string statement = Squeeze(pending);
        pending.clear();
        const size_t mask = statement.find("used_bytes_mask ");
        if (statement.empty()) continue;
        if (statement.rfind(".pragma", 0) == 0) {
          if (mask != std::string::npos)
            used_bytes_ = std::stoull(statement.substr(mask + 16), nullptr, 16);
        } else if (statement[0] == '.') {
          Declare(statement);
        } else {
          AddStatement(statement, pending_line);
        }
      } else {
        if (blank) pending_line = line;
        pending += c;
      }
    }
  }

  const std::string text_;
  Program program_;
  std::vector<Scope> scopes_;
  uint64_t used_bytes_ = ~uint64_t{0};
};

}  // namespace

Program ParsePtx(const std::string& source) { return Parser(source).Parse(); }

}  // namespace model
