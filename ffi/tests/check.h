// A test is a function: TEST(Name) { CHECK(...); }. The file ends with TEST_MAIN.

#ifndef JGG_TESTS_CHECK_H_
#define JGG_TESTS_CHECK_H_

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& Failures() {
  static int failures = 0;
  return failures;
}

inline bool Register(const char* name, void (*run)()) {
  Tests().push_back({name, run});
  return true;
}

inline void Fail(const char* file, int line, const std::string& what) {
  ++Failures();
  std::printf("%s:%d: %s\n", file, line, what.c_str());
}

template <typename T>
void Print(std::ostream& out, const T& value) {
  out << value;
}

template <typename T>
void Print(std::ostream& out, const std::vector<T>& values) {
  out << "{ ";
  for (const T& value : values) out << value << " ";
  out << "}";
}

template <typename A, typename B>
void Equal(const char* file, int line, const char* expression, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream text;
  text << expression << ": ";
  Print(text, a);
  text << " != ";
  Print(text, b);
  Fail(file, line, text.str());
}

inline void Contains(const char* file, int line, const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    Fail(file, line, "'" + part + "' is missing in: " + text);
  }
}

// What `body` throws, or "" if it throws nothing.
template <typename Body>
std::string Thrown(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline int RunAll() {
  for (const Test& test : Tests()) {
    const int before = Failures();
    try {
      test.run();
    } catch (const std::exception& error) {
      Fail(test.name, 0, error.what());
    }
    std::printf("%s %s\n", Failures() == before ? "ok    " : "FAILED", test.name);
  }
  return Failures() == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                    \
  static void name();                                                 \
  static const bool name##_registered = check::Register(#name, name); \
  static void name()
#define CHECK(condition) \
  if (!(condition)) check::Fail(__FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check::Equal(__FILE__, __LINE__, #a " == " #b, a, b)
#define CHECK_CONTAINS(text, part) check::Contains(__FILE__, __LINE__, text, part)
#define TEST_MAIN \
  int main() { return check::RunAll(); }

#endif  // JGG_TESTS_CHECK_H_
