/* Registers as a uprobe finds them: the order is the kernel's ABI (arch/x86/include/asm/ptrace.h, arch/arm64/include/asm/ptrace.h).
 * NW_PARM(ctx, n) is the nth integer argument at a function's entry, as far as arguments travel in registers: n from 1 to
 * NW_REGISTERS (System V ABI for x86-64; AAPCS64). NW_LINK says that the return address is in a register, not on the stack.
 */
#pragma once
#include <linux/types.h>

#if defined(__aarch64__)
struct pt_regs {
	unsigned long regs[31], sp, pc, pstate;
};
#define NW_REGISTERS 8
#define NW_PARM(ctx, n) ((ctx)->regs[(n) - 1])
#define NW_RESULT(ctx) ((ctx)->regs[0])
#define NW_IP(ctx) ((ctx)->pc)
#define NW_SP(ctx) ((ctx)->sp)
/* Pointer authentication signs with the bits above a user address. */
#define NW_LINK(ctx) ((ctx)->regs[30] & ((1UL << 48) - 1))
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#define NW_REGISTERS 6
#define NW_PARM1(ctx) ((ctx)->di)
#define NW_PARM2(ctx) ((ctx)->si)
#define NW_PARM3(ctx) ((ctx)->dx)
#define NW_PARM4(ctx) ((ctx)->cx)
#define NW_PARM5(ctx) ((ctx)->r8)
#define NW_PARM6(ctx) ((ctx)->r9)
#define NW_PARM(ctx, n) NW_PARM##n(ctx)
#define NW_RESULT(ctx) ((ctx)->ax)
#define NW_IP(ctx) ((ctx)->ip)
#define NW_SP(ctx) ((ctx)->sp)
#endif
