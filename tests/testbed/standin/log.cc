#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <string>

namespace standin {

namespace {

int log_level() {
  static const int level = [] {
    const char* text = getenv("TESTBED_LOG");
    return text ? atoi(text) : 0;
  }();
  return level;
}

void print(const char* format, va_list arguments) {
  char text[1024];
  vsnprintf(text, sizeof text, format, arguments);
  fprintf(stderr, "[testbed %d:%ld] %s\n", getpid(), syscall(SYS_gettid), text);
}

}  // namespace

void log(int level, const char* format, ...) {
  if (level > log_level()) return;
  va_list arguments;
  va_start(arguments, format);
  print(format, arguments);
  va_end(arguments);
}

void unsupported(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char text[896];
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[testbed %d] not supported by the CPU testbed: %s\n", getpid(), text);
  fflush(nullptr);
  _exit(86);
}

void refuse(const char* what) {
  static std::mutex mutex;
  static std::set<std::string> said;
  std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(what).second) fprintf(stderr, "[testbed %d] not supported by the CPU testbed: %s\n", getpid(), what);
}

}  // namespace standin
