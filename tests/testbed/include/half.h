// The compiler's own 16-bit float.
#pragma once

#if defined(__aarch64__)
using Half = __fp16;  // g++ 12 knows _Float16 in C alone there
#else
using Half = _Float16;
#endif
