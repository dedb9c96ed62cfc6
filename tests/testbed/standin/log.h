// Messages of the stand-in, on standard error.
#pragma once

namespace standin {

// Diagnostic output, only with TESTBED_LOG=1 (calls) or 2 (everything).
[[gnu::format(printf, 2, 3)]] void log(int level, const char* format, ...);

// What the testbed does not do: say so by name and end the process, because guessing would corrupt the job's data.
[[noreturn, gnu::format(printf, 1, 2)]] void unsupported(const char* format, ...);

// The same for a call that can be refused with an error code; each text is printed once.
void refuse(const char* what);

}  // namespace standin
