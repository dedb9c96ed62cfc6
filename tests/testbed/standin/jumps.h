// Code that is written while the job runs: a jump to a function, and a call with one argument. By architecture.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace standin {

#if defined(__aarch64__)

// ldr x16, .+8; br x16; .quad target. x16 is the register that linkers use for this (AAPCS64).
constexpr size_t kJumpSize = 16;
inline void write_jump(unsigned char* at, const void* target) {
  static constexpr uint32_t kCode[2] = {0x58000050, 0xd61f0200};
  memcpy(at, kCode, sizeof kCode);
  memcpy(at + sizeof kCode, &target, sizeof target);
}

// ldr x0, .+16; ldr x16, .+20; br x16; nop; .quad argument, target
constexpr size_t kStubSize = 32;
inline void write_call(unsigned char* at, const void* argument, const void* target) {
  static constexpr uint32_t kCode[4] = {0x58000080, 0x580000b0, 0xd61f0200, 0xd503201f};
  memcpy(at, kCode, sizeof kCode);
  memcpy(at + 16, &argument, sizeof argument);
  memcpy(at + 24, &target, sizeof target);
  __builtin___clear_cache(reinterpret_cast<char*>(at), reinterpret_cast<char*>(at) + kStubSize);
}

#else

// jmp *0(%rip); .quad target
constexpr size_t kJumpSize = 14;
inline void write_jump(unsigned char* at, const void* target) {
  static constexpr unsigned char kOpcode[6] = {0xff, 0x25, 0, 0, 0, 0};
  memcpy(at, kOpcode, sizeof kOpcode);
  memcpy(at + sizeof kOpcode, &target, sizeof target);
}

// mov $argument,%rdi; mov $target,%rax; jmp *%rax
constexpr size_t kStubSize = 32;
inline void write_call(unsigned char* at, const void* argument, const void* target) {
  static constexpr unsigned char kArgument[2] = {0x48, 0xbf}, kTarget[2] = {0x48, 0xb8}, kJump[2] = {0xff, 0xe0};
  memcpy(at, kArgument, 2);
  memcpy(at + 2, &argument, sizeof argument);
  memcpy(at + 10, kTarget, 2);
  memcpy(at + 12, &target, sizeof target);
  memcpy(at + 20, kJump, 2);
}

#endif

}  // namespace standin
