/* Registers of x86-64 as a uprobe finds them: the order is the kernel's ABI (arch/x86/include/asm/ptrace.h). */
#pragma once
#include <linux/types.h>

struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};
