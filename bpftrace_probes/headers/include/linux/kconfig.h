/* The only option that BCC's own headers ask for. */
#pragma once
#define CONFIG_BPF_SYSCALL 1
